"""The residual stream between two norms: hidden states, and the output of the last branch, which is not added yet.

The next norm adds them, because it reads both anyway. That saves one pass over memory in forward and two in backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ResidualStream(NamedTuple):
    """The sum x + added, not computed yet. Shapes: both [S, B, H]."""

    x_SBH: Tensor
    added_SBH: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum."""
        return self.x_SBH if self.added_SBH is None else self.x_SBH + self.added_SBH
