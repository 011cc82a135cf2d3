"""Published figures next to weft's own, in the papers' settings: simulated and, in part, on a GPU."""
