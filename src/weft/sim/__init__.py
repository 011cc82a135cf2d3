"""Block-level simulation of compute and communication that share a GPU."""
