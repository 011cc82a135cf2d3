"""Fixtures of the simulator's tests."""

from __future__ import annotations

from command_line import weft

__all__ = ["weft"]
