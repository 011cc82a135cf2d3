"""GPU data: presets (specs), blocks per SM (occupancy), the GPUs of this machine (probe), and cost.

Nothing here imports torch, and importing the package loads no driver.
"""
