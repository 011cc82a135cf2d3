"""Plan: what a training step takes at scale, and what overlap is worth there. Needs no torch."""
