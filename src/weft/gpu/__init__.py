"""Facts about GPUs: presets (specs), how many blocks fit on an SM (occupancy), what this machine has (probe).

Nothing here imports torch, and importing the package loads no driver.
"""
