"""A case of the benchmark of operators: the timed work of an operation and of its form in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Operation = Callable[..., Tensor | tuple[Tensor, ...]]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the cases. `vocab_size`: of the cross entropy; `num_weights`: of an optimizer's shard."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab_size: int = 128256
    num_weights: int = 1 << 28


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One measurement. `theirs` makes the plain torch form, given a wrapper: `compiled`, or one that does nothing."""

    name: str
    num_bytes: int
    ours: Callable[[], Work]
    theirs: Callable[[Callable[[Operation], Operation]], Work] | None
    why_not_compiled: str = ""


def compiled(operation: Operation) -> Operation:
    """Return the operation, compiled by torch for the sizes with which it is called."""
    return torch.compile(operation, dynamic=False)


def pair(name: str, ours: Operation, theirs: Operation, make: Callable[[], list[Tensor]], bytes_each: tuple[int, int],
          ) -> Iterator[OperatorCase]:  # fmt: skip
    """Yield the forward and the backward case of one operation."""
    yield OperatorCase(
        f"{name} forward", bytes_each[0], lambda: forward(ours, make()), lambda wrap: forward(wrap(theirs), make())
    )
    yield OperatorCase(
        f"{name} backward", bytes_each[1], lambda: backward(ours, make()), lambda wrap: backward(wrap(theirs), make())
    )


def forward(operation: Operation, inputs: Sequence[Tensor]) -> Work:
    """Return the work of a forward pass without a graph."""

    def work() -> None:
        with torch.no_grad():
            operation(*inputs)

    return work


def backward(operation: Operation, inputs: Sequence[Tensor]) -> Work:
    """Return the work of a backward pass of a graph that is made once."""
    leaves = [one.requires_grad_() if one.is_floating_point() else one for one in inputs]
    kept: dict[str, list[Tensor]] = {}

    def work() -> None:
        # the graph is made on the stream that is recorded, because backward runs on the stream of its forward
        if not kept:
            out = operation(*leaves)
            outs = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
            kept["outs"], kept["grads"] = outs, [torch.randn_like(one) for one in outs]
        torch.autograd.grad(
            kept["outs"], [one for one in leaves if one.requires_grad], kept["grads"], retain_graph=True
        )

    return work


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random values of a normal distribution."""
    return torch.randn(*shape, device=device, dtype=dtype)
