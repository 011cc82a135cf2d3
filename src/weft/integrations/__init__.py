"""weft inside other programs.

autoload   what `weft run --tune` puts on the path of a program: torch loads it by itself
live       tunes the job that it finds itself in (the tuning itself is weft.tuning.live.session)
step       where one step of a program ends and the next begins
controls   what can be changed in a running process, and what is learnt about it
"""
