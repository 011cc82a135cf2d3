"""Suites of workloads, their runner, and result files."""
