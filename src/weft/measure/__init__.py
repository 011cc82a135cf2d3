"""Interleaved measurement and its statistics. Knows neither torch nor GPUs: what is measured is injected."""
