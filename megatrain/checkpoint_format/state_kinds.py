"""The kinds of state of a checkpoint that can be read as weights."""

from __future__ import annotations

MASTER = "master"
"""The weights themselves, in full precision."""
EMA = "ema"
"""Their exponential moving average."""
