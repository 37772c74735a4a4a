"""The counter of tensor bytes equals torch's own allocator, and results on meta have the sizes of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from megatrain.planning.meta_results import MetaResults
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes

MIB = 1 << 20


class Doubled(torch.autograd.Function):
    """Allocates a hidden tensor of 1 MiB in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hidden = torch.ones(MIB // 4)
        return x * 2 + hidden[0] * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hidden = torch.ones(2 * MIB // 4)
        return grad * 2 + hidden[0] * 0


def allocator_peak(prof: profile) -> int:
    """Return the most bytes allocated at once, from the allocator's own events."""
    live = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_peak_is_that_of_the_allocator() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 512)

    def step() -> None:
        x = torch.randn(128, 256, requires_grad=True)
        y = functional.gelu(linear(x))
        (y * y.detach().exp()).sum().backward()
        linear.zero_grad()

    step()  # allocated once and kept, as the kernels' own state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    with PeakTensorBytes().include(linear) as memory:
        before = memory.live_bytes
        step()

    assert before == (256 * 512 + 512) * 4
    assert abs(memory.peak_bytes - before - allocator_peak(prof)) < 0.02 * allocator_peak(prof)
    assert memory.live_bytes == before


def test_custom_functions_are_seen_in_both_directions() -> None:
    x = torch.ones(4, requires_grad=True)
    with PeakTensorBytes() as memory:
        y = Doubled.apply(x)
        assert MIB <= memory.peak_bytes < MIB + 4096
        memory.reset_peak()
        y.sum().backward()
        assert 2 * MIB <= memory.peak_bytes < 2 * MIB + 4096
        assert memory.live_bytes < 4096


def test_views_count_once_and_live_as_long_as_the_last_of_them() -> None:
    with PeakTensorBytes() as memory:
        whole = torch.zeros(1000)
        parts = [whole[:10], whole.view(10, 100), whole.detach()]
        assert memory.live_bytes == 4000
        del whole
        assert memory.live_bytes == 4000
        parts.clear()
        assert memory.live_bytes == 0
    assert memory.peak_bytes == 4000


def test_tensors_from_before_are_counted_when_named() -> None:
    module = nn.Linear(8, 8, bias=False)
    module.weight.grad = torch.zeros(8, 8)
    extra = [torch.zeros(16), torch.zeros(16)]
    with PeakTensorBytes().include(module, extra, extra[0]) as memory:
        assert memory.live_bytes == 2 * 256 + 2 * 64
        module.weight.grad = None
        assert memory.live_bytes == 256 + 2 * 64


def test_meta_tensors_and_resized_storages_are_counted() -> None:
    with PeakTensorBytes() as memory:
        meta = torch.zeros(1 << 20, device="meta")
        x = torch.zeros(100)
        x.resize_(1000)
        assert (meta.numel(), memory.live_bytes) == (1 << 20, 4000)


aten = torch.ops.aten
COMPUTED: list[tuple[int, ...]] = []
"""The sizes of the inputs for which `meta_results_test::count` was computed."""


@torch.library.custom_op("meta_results_test::count", mutates_args=())
def count(x: Tensor, factor: float) -> Tensor:
    return x * factor


@count.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    COMPUTED.append(tuple(x.shape))
    return torch.empty_like(x)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def turned(*shape: int) -> Tensor:
    return empty(*shape).transpose(0, 1)


OPERATIONS: dict[str, tuple[Any, Sequence[Sequence[Any]]]] = {
    # each with several arguments that must not be confused
    "broadcast": (aten.mul.Tensor, [(empty(3, 4), empty(4)), (empty(3, 1), empty(4)), (empty(4), empty(4))]),
    "strides": (aten.mul.Tensor, [(empty(3, 3), 2.0), (turned(3, 3), 2.0)]),
    "dtypes of numbers": (
        aten.mul.Tensor,
        [(empty(2, dtype=torch.int64), 1.0), (empty(2, dtype=torch.int64), 1), (empty(2, dtype=torch.bool), True)],
    ),
    "dtypes of tensors": (aten.add.Tensor, [(empty(2), empty(2)), (empty(2), empty(2, dtype=torch.float64))]),
    "lists": (aten.cat.default, [([empty(2), empty(3)],), ([empty(2), empty(3), empty(1)],)]),
    "several results": (aten.topk.default, [(empty(5, 7), 2), (empty(5, 7), 3)]),
    "in place": (aten.mul_.Tensor, [(empty(3, 4), 2.0), (empty(3, 4), empty(4))]),
    "resized in place": (aten.resize_.default, [(empty(3), [7]), (empty(3), [9])]),
    "view that is not declared": (aten._unsafe_view.default, [(empty(3, 4), [12]), (empty(3, 4), [4, 3])]),
    "view": (aten.view.default, [(empty(3, 4), [12]), (empty(3, 4), [4, 3])]),
}


def outline(value: Any, inputs: Sequence[Tensor]) -> Any:
    """Return sizes and bytes of a result, and which inputs share its memory."""
    if isinstance(value, tuple | list):
        return [outline(one, inputs) for one in value]
    memory = value.untyped_storage()
    shared = [number for number, one in enumerate(inputs) if one.untyped_storage()._cdata == memory._cdata]
    return value.shape, value.stride(), value.dtype, value.device.type, memory.nbytes(), shared


@pytest.mark.parametrize("case", OPERATIONS)
def test_results_are_those_of_torch_each_time(case: str) -> None:
    operation, several = OPERATIONS[case]
    results = MetaResults()
    for _ in range(3):
        for args in several:
            fresh = [x.clone() if isinstance(x, Tensor) and x.is_contiguous() else x for x in args]
            expected = [x.clone() if isinstance(x, Tensor) and x.is_contiguous() else x for x in args]
            tensors, others = ([x for x in values if isinstance(x, Tensor)] for values in (fresh, expected))
            found = outline(results.call(operation, fresh, {}), tensors)
            assert found == outline(operation(*expected), others)


def test_equal_operations_are_computed_once() -> None:
    results = MetaResults()
    COMPUTED.clear()
    operation = torch.ops.meta_results_test.count.default
    made = [results.call(operation, (empty(*shape), 2.0), {}) for shape in [(3,), (4,)] * 3]
    assert COMPUTED == [(3,), (4,)]
    assert [one.shape for one in made] == [(3,), (4,)] * 3
    assert len({one.untyped_storage()._cdata for one in made}) == len(made)
