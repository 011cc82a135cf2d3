"""weft inside other programs.

autoload   what `weft run --tune` puts on the path of a program: torch loads it by itself
live       tunes the job that it finds itself in
step       where one step of a program ends and the next begins
controls   what can be changed in a running process, and what is learnt about it
stall      goes back to a harmless policy where a trial does not come to its end
"""
