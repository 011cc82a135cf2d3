"""Suites of workloads, what runs them, and the files that results go to."""
