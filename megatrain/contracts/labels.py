"""The label of a token that has no loss. The data reader sets it, and the loss ignores it."""

from __future__ import annotations

IGNORED_LABEL = -100
