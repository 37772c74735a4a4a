"""Paced compute: the true numerics on small tensors, which wait until a stated time is over, as for a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatrain.parallel import sequence_chunks
from megatrain.parallel.graphed_chunk import Backward
from megatrain.parallel.pipeline import PipelineChunk
from tests.helpers.paced_train import pause_until


def paced_forward(forward_s: float) -> Any:
    """Return a chunk's forward that takes so long at least, with a backward of twice that. 0: as it is."""
    forward = PipelineChunk.forward

    def paced(chunk: PipelineChunk, x: Tensor, context: Any, labels_SB: Tensor | None) -> tuple[Tensor, Backward]:
        until = time.monotonic() + forward_s
        out, backward = forward(chunk, x, context, labels_SB)

        def paced_backward(gradient: Tensor) -> None:
            until = time.monotonic() + 2.0 * forward_s
            backward(gradient)
            pause_until(until)

        pause_until(until)
        return out, paced_backward

    return paced if forward_s > 0.0 else forward


@contextmanager
def paced_products(product_s: float, num_pieces: int) -> Iterator[None]:
    """Let each product of a chunked branch take so long for each of the pieces of the sequence. 0: as they are."""
    seconds: dict[str, Callable[..., float]] = {
        "_multiply": lambda *_: product_s,
        "_sum_of_products": lambda pieces, _: product_s * len(pieces),
        "weight_gradient": lambda *_: product_s * num_pieces,
    }
    with ExitStack() as stack:
        for name, takes in seconds.items() if product_s > 0.0 else ():
            product = getattr(sequence_chunks, name)
            stack.enter_context(patch.object(sequence_chunks, name, _paced_product(product, takes)))
        yield


def _paced_product(product: Callable[..., Any], takes: Callable[..., float]) -> Callable[..., Any]:
    def paced(*arguments: Any) -> Any:
        until = time.monotonic() + takes(*arguments)
        out = product(*arguments)
        pause_until(until)
        return out

    return paced
