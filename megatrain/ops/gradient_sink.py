"""Where a parameter's gradient is summed, so that backward can add to the sum itself instead of returning a gradient.

That saves a tensor of the weight's size, a pass over the sum, and, in half precision, the rounding of each
micro-batch's gradient before it is added. Whoever keeps such sums gives a parameter a sink; operations that know of
sinks ask for it, and all others go on returning gradients. Products with weights leave it to the sink when they run: no
gradient of an input waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

_ATTRIBUTE = "gradient_sink"

Addition = Callable[[Tensor, bool], None]
"""Adds one micro-batch's gradient to a sum: called with its memory, in the parameter's shape, and whether it is fresh.

Fresh memory holds anything and must be overwritten; other memory is to be added to.
"""


class GradientSink(Protocol):
    """The sum of one parameter's gradients over the micro-batches of a step."""

    def add(self, add: Addition) -> None:
        """Have `add` add to the sum, before this returns."""

    def add_product(self, add: Addition) -> None:
        """Have `add` add a product to the sum, now or later; products are added in the order in which they come.

        Until then the sink keeps `add` and what it refers to. That must be nothing but the product's factors, which
        nobody may change, and without autograd's history, which would keep the graph.
        """


def set_gradient_sink(parameter: nn.Parameter, sink: GradientSink) -> None:
    """Let operations add the gradient of `parameter` to `sink`."""
    setattr(parameter, _ATTRIBUTE, sink)


def gradient_sink_of(tensor: Tensor) -> GradientSink | None:
    """Return the sink of a parameter that has one."""
    return getattr(tensor, _ATTRIBUTE, None)
