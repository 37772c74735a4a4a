"""Paced compute: a real computation on small tensors, then a wait for the rest of the time of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from megatrain.model import Transformer
from megatrain.ops.normalization import ResidualStream
from megatrain.parallel import sequence_chunks
from megatrain.parallel.graphed_chunk import Backward
from megatrain.parallel.pipeline import PipelineChunk
from tests.helpers.paced_train import pause_until


def paced_forward(forward_s: float) -> Any:
    """Return a chunk's forward that takes at least `forward_s`, with a backward of at least twice that. 0: no pace."""
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


class LayerPace:
    """Lets each layer of a chunk take `layer_s` in forward, and twice that in backward.

    Embedding and head take a time in proportion to their number of parameters. The wait for parameters is not part of a
    layer's time. A backward waits before it computes. So gradients are written at the end of their layer's time, and
    their bucket can travel only during the backward of the layers below.
    """

    def __init__(self, layer_s: float) -> None:
        self._layer_s = layer_s
        self._began_s = 0.0
        """When the forward of the current layer began, on the monotonic clock."""
        self._computed_s = 0.0
        """This thread's processor time when the previous wait ended. Its compute since then counts for the next layer.

        Waiting for an exchange takes no processor time.
        """

    def attach(self, module: Transformer) -> None:
        """Pace this chunk from now on. Its hooks are added last, so they run after the wait for parameters."""
        parts = [module.embedding, *module.blocks.values(), module.loss_head]
        layer_size = max(_num_parameters(block) for block in module.blocks.values())
        for part in (part for part in parts if part is not None):
            seconds = self._layer_s * _num_parameters(part) / layer_size
            part.register_forward_pre_hook(self._before_forward)
            part.register_forward_hook(partial(self._after_forward, seconds))

    def _before_forward(self, *_: object) -> None:
        self._began_s = time.monotonic()

    def _after_forward(self, seconds: float, _part: nn.Module, _args: object, out: Tensor | ResidualStream) -> None:
        pause_until(self._began_s + seconds)
        self._computed_s = time.thread_time()
        # the branch that was last in forward is the first in backward
        last = out.added_SBH if isinstance(out, ResidualStream) and out.added_SBH is not None else out
        last = last.x_SBH if isinstance(last, ResidualStream) else last
        if last.requires_grad:
            last.register_hook(partial(self._before_backward, 2.0 * seconds))

    def _before_backward(self, seconds: float, _gradient: Tensor) -> None:
        pause_until(time.monotonic() + seconds - (time.thread_time() - self._computed_s))
        self._computed_s = time.thread_time()


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def paced_products(product_s: float, num_chunks: int) -> Iterator[None]:
    """Let each product of a chunked branch take `product_s` for each sequence chunk. 0: original products."""
    seconds: dict[str, Callable[..., float]] = {
        "_multiply": lambda *_: product_s,
        "_sum_of_products": lambda rows, _: product_s * len(rows),
        "weight_gradient": lambda *_: product_s * num_chunks,
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
