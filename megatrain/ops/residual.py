"""The residual stream between two norms: hidden states, and what the last branch adds to them.

Adding is left to the next norm, which reads both anyway: one pass over memory less in forward, two in backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ResidualStream(NamedTuple):
    """x + added, not added up yet. Shapes: both [S, B, H]."""

    x_SBH: Tensor
    added_SBH: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum."""
        return self.x_SBH if self.added_SBH is None else self.x_SBH + self.added_SBH
