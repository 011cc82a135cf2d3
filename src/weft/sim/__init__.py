"""A GPU in a box: block-level simulation of compute and communication that share a GPU."""
