"""Observes the jobs that `weft run` started on this machine from outside, through the jobs' folders.

Nothing here runs in a job or adds work to it: the shim and live tuning write their counters whether or not
anyone reads them.
"""
