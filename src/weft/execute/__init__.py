"""Executors: run a Workload under a Policy and return what was measured."""
