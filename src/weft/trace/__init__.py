"""Profiler traces: what is exposed, why, and what would hide it. Needs neither torch nor a GPU."""

from weft.trace.analysis import Analysis, RankAnalysis, analyze
from weft.trace.compare import compare

__all__ = ["Analysis", "RankAnalysis", "analyze", "compare"]
