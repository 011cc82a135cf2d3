"""Tuning: candidates, searches over them, the Verdict they reach, and the store that keeps verdicts."""
