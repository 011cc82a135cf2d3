"""Published figures next to weft's own: the papers' settings on simulated nodes and, in part, on a GPU."""
