"""Running jobs, observed from outside: what `weft run` started on this machine, read from the jobs' folders.

Nothing here runs in a job or makes a job do more: the shim and live tuning write their counters whether
they are read or not.
"""
