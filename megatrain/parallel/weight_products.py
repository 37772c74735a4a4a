"""When the products that give weights' gradients run: as backward comes to them, or later.

No gradient of an input waits for them, so a pipeline may put them off to where it would be idle. Backward then leaves
behind each product's two factors. They are kept by micro-batch, and carried out in the order in which backward came to
them: sums get the same addends in the same order as without the delay.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Product = Callable[[], None]


class PutOffProducts:
    """The products that one backward left behind."""

    def __init__(self) -> None:
        self._products: deque[Product] = deque()

    def add(self, product: Product) -> None:
        self._products.append(product)

    def __len__(self) -> int:
        return len(self._products)

    def carry_out(self) -> None:
        """Run the products, and let go of each one's factors as soon as it has run."""
        with torch.no_grad():
            while self._products:
                self._products.popleft()()


class WeightProducts:
    """Decides for all weights of one chunk when their products run."""

    def __init__(self) -> None:
        self._put_off: PutOffProducts | None = None

    def run(self, product: Product) -> None:
        """Run `product` now, or inside of put_off() later."""
        if self._put_off is None:
            product()
        else:
            self._put_off.add(product)

    @contextmanager
    def put_off(self) -> Iterator[PutOffProducts]:
        """Collect the products that a backward in this context comes to."""
        assert self._put_off is None, "one backward runs at a time"
        self._put_off = PutOffProducts()
        try:
            yield self._put_off
        finally:
            self._put_off = None
