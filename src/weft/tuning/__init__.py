"""Tuning: candidates, the searches that race them, their Verdict, and the store that keeps verdicts."""
