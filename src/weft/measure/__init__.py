"""Interleaved measurement and its statistics. Independent of torch and GPUs: the measurement is injected."""
