"""Decides when wgrads run: when backward reaches them, or deferred.

A wgrad is the matrix multiplication that computes a weight's gradient. No dgrad (the gradient of an input) depends on
it, so a pipeline may defer it to a time when it would otherwise be idle. Backward then keeps the two operands of each
wgrad, by micro-batch. Deferred wgrads run in the order in which backward reached them, so sums get the same addends in
the same order.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Wgrad = Callable[[], None]


class DeferredWgrads:
    """The wgrads that one backward deferred."""

    def __init__(self) -> None:
        self._wgrads: deque[Wgrad] = deque()

    def add(self, wgrad: Wgrad) -> None:
        self._wgrads.append(wgrad)

    def __len__(self) -> int:
        return len(self._wgrads)

    def carry_out(self) -> None:
        """Run the wgrads, and release the operands of each as soon as it has run."""
        with torch.no_grad():
            while self._wgrads:
                self._wgrads.popleft()()


class Wgrads:
    """Decides when the wgrads of one chunk run."""

    def __init__(self) -> None:
        self._deferred: DeferredWgrads | None = None

    def run(self, wgrad: Wgrad) -> None:
        """Run `wgrad` now, or collect it for later if deferring() is active."""
        if self._deferred is None:
            wgrad()
        else:
            self._deferred.add(wgrad)

    @contextmanager
    def deferring(self) -> Iterator[DeferredWgrads]:
        """Collect the wgrads that a backward in this context reaches, instead of running them."""
        assert self._deferred is None, "one backward runs at a time"
        self._deferred = DeferredWgrads()
        try:
            yield self._deferred
        finally:
            self._deferred = None
