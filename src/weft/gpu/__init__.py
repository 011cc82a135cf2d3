"""GPU data: specs and presets, blocks per SM (occupancy), the GPUs of this machine (probe), and costs.

Nothing here imports torch, and importing the package loads no driver.
"""
