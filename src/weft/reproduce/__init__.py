"""Published figures compared with weft's own: the papers' settings, simulated and, in part, on a GPU."""
