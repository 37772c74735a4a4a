"""Beginnings of messages that a rank logs and other programs search for."""

from __future__ import annotations

REPLACED_SAMPLES = "data.bad_samples: "
"""Begins the message about each sample that was replaced, with its address."""
