"""The label of a token that has no loss. Those who read data and those who compute the loss agree on it."""

from __future__ import annotations

IGNORED_LABEL = -100
