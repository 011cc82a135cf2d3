"""Tuning: which policy is best, and whether the gain is real."""
