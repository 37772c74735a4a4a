"""Backward recomputes some of the tensors that it needs, so that they are not kept.

Selective recompute: autograd saves the input of every matrix multiplication. Some of these inputs are cheap to
recompute: a gathered sequence from this rank's rows, a norm's output from its input, an activation's output from its
input. While a chunk runs inside the context SelectiveRecompute, such an output is registered with a function that
recomputes it. When autograd saves the output (or a view of it), the function is kept in its place. Backward runs the
function once for all uses of the output.
Source: Korthikanti et al. (2205.05198), for the idea of gathering again in backward.

Full recompute keeps only each block's input, and backward runs the block again. Selective recompute
(`parallel.recompute = "selective"`) is cheaper. It is part of the tensor plan (tensor_plan.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatrain.ops.normalization import ResidualStream


@dataclass(slots=True)
class _RecomputedOutput:
    """How to compute a registered output again, and the result as long as uses of it remain."""

    load_source: Callable[[], Tensor]
    recompute: Callable[[Tensor], Tensor]
    num_uses: int = 0
    result: Tensor | None = None

    def take(self) -> Tensor:
        """Return the output. The first use computes it, and the last use drops it."""
        if self.result is None:
            with torch.no_grad():
                self.result = self.recompute(self.load_source())
        result = self.result
        self.num_uses -= 1
        if self.num_uses == 0:
            self.result = None
        return result


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of an output that can be recomputed, as autograd saves it."""

    output: _RecomputedOutput
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Keeper(Protocol):
    """Holds the saved tensors that cannot be recomputed."""

    def keep(self, x: Tensor) -> Any:
        """Return what to hold in place of the saved tensor x."""

    def load(self, kept: Any) -> Tensor:
        """Return the saved tensor, given what keep() returned."""


class _InPlace:
    """Keeps each saved tensor in its own memory."""

    def keep(self, x: Tensor) -> Tensor:
        return x.detach()  # x itself may be the output of the function that saves it: such a cycle is never freed

    def load(self, kept: Tensor) -> Tensor:
        return kept


class SelectiveRecompute:
    """A context in which backward recomputes registered outputs, and a keeper holds all other saved tensors.

    An output is identified by its storage object, which torch keeps for as long as any tensor uses that memory. So the
    registration ends with the output, and no output is mistaken for another, even on devices without memory (meta).
    """

    def __init__(self) -> None:
        self.keeper: Keeper = _InPlace()
        self._outputs: weakref.WeakKeyDictionary[torch.UntypedStorage, _RecomputedOutput] = weakref.WeakKeyDictionary()
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> SelectiveRecompute:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._load)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, error, trace)

    def register(self, output: Tensor, source: Tensor, recompute: Callable[[Tensor], Tensor]) -> None:
        """Register that `recompute(source)` returns `output` again. `source` may be a registered output itself."""
        if torch.is_grad_enabled() and self._hooks:
            kept = self._save(source.detach())
            self._outputs[output.untyped_storage()] = _RecomputedOutput(lambda: self._load(kept), recompute)

    def _save(self, x: Tensor) -> Any:
        output = self._outputs.get(x.untyped_storage())
        if output is None:
            return self.keeper.keep(x)
        output.num_uses += 1
        return _Saved(output, x.size(), x.stride(), int(x.storage_offset()))

    def _load(self, saved: Any) -> Tensor:
        if isinstance(saved, _Saved):
            return saved.output.take().as_strided(saved.size, saved.stride, saved.offset)
        return self.keeper.load(saved)


def recompute_fully(block: nn.Module) -> None:
    """Make backward run `block` again. Dropout draws the same masks, because a mask depends only on its position.

    The residual stream is added up before and after the block, so that one tensor is kept instead of two.
    """
    forward = block.forward

    def run_block(x_SBH: Tensor, *rest: Any) -> Tensor:
        return forward(ResidualStream(x_SBH), *rest).total()

    def run(stream: ResidualStream, *rest: Any) -> ResidualStream:
        total = checkpoint(run_block, stream.total(), *rest, use_reentrant=False, preserve_rng_state=False)
        return ResidualStream(total)

    block.forward = run
