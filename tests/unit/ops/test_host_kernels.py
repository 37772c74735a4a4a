"""The kernels for CPUs (csrc/host_kernels), compared bit by bit with the same operators in torch operations."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatrain.ops import optimizer_reference
from megatrain.ops.host_kernels import adamw_kernel, lamb_direction_kernel, step_kernel
from megatrain.ops.optimizer_reference import reference_adamw, reference_lamb_direction
from tests.helpers.kernels import UNDER_TEST
from tests.helpers.optimizer_shards import LAYOUTS, OPS, make_shard
from tests.helpers.require import require

INT_OF = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
# zeros, subnormal numbers, the smallest normal and the largest ones, infinities and NaN
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1.2e-38,
    5e-324,
    2.3e-308,
    3e38,
    -1.7e308,
    float("inf"),
    -float("inf"),
    float("nan"),
)
ODDS = st.integers(0, 17)


@pytest.fixture(scope="module", autouse=True)
def _needs_the_library() -> None:
    if UNDER_TEST.kind != "reference":
        pytest.skip("other kernels take the place of those for CPUs")
    found = importlib.util.find_spec("megatrain._host_kernels")
    require("compiler", found is not None, "megatrain._host_kernels was not built")


def values(numel: int, seed: int, dtype: torch.dtype, specials: Sequence[int], at: int = 0) -> Tensor:
    """Return random numbers with some special ones, `at` elements behind the begin of their memory."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp(4 * torch.randn(numel, generator=generator, dtype=torch.float64))
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64) * magnitude
    for number, special in enumerate(specials if numel else ()):
        drawn[(number * 7919 + seed) % numel] = SPECIAL[special]
    memory = torch.empty(numel + at, dtype=dtype)
    memory[at:] = drawn
    # a NaN with all bits of its payload: rounding it like a number would make it a zero
    memory.view(INT_OF[dtype])[memory.isnan()] = torch.iinfo(INT_OF[dtype]).max
    return memory[at:]


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check equality bit by bit, except for the bits of a NaN, which vary within torch too."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (side.masked_fill(side.isnan(), 0.0) for side in (one, other))
        assert torch.equal(one.view(INT_OF[one.dtype]), other.view(INT_OF[other.dtype]))


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    dtypes=st.sampled_from([(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float64,) * 2]),
    offsets=st.tuples(ODDS, ODDS, ODDS, ODDS, ODDS),
    specials=st.lists(st.integers(0, len(SPECIAL) - 1), max_size=8),
    seed=st.integers(0, 1000),
    beta1=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    is_published=st.booleans(),
    block=st.sampled_from([37, 1 << 18]),
)
@example(  # a gradient of -0
    lengths=[70, 3, 1],
    dtypes=(torch.float32, torch.float32),
    offsets=(0, 0, 0, 0, 0),
    specials=[1, 0, 1, 1],
    seed=0,
    beta1=0.0,
    weight_decay=0.1,
    is_published=True,
    block=37,
)
def test_kernel_has_the_bits_of_torch(
    lengths: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    offsets: tuple[int, ...],
    specials: list[int],
    seed: int,
    beta1: float,
    weight_decay: float,
    is_published: bool,
    block: int,
) -> None:
    grad_dtype, dtype = dtypes
    numel = sum(lengths)
    borders, decays = torch.tensor([0, *accumulate(lengths[:-1])]), torch.arange(len(lengths) - 1) % 3 != 1
    scalars = (beta1, 0.95, 1e-8, weight_decay, 1 - 0.9**3, 1 - 0.95**3, 0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_reference, "OPTIMIZER_BLOCK_ELEMENTS_ON_CPU", block)
        updates: list[tuple[Callable[..., Any] | None, Callable[..., Any]]] = [(adamw_kernel(), reference_adamw)]
        if grad_dtype == dtype:
            updates.append((lamb_direction_kernel(), reference_lamb_direction))
        for kernel, reference in updates:
            assert kernel is not None, "the kernel is not used here: it differs from this torch"
            is_lamb = reference is reference_lamb_direction
            sides = []
            for update in (kernel, reference):
                flat = [
                    values(numel, seed + number, of, specials, at)
                    for number, (of, at) in enumerate(zip((grad_dtype, dtype, dtype, dtype), offsets, strict=False))
                ]
                flat[3].abs_()
                published = None
                if is_published and dtype == torch.float32 and not is_lamb:
                    published = torch.zeros(numel + offsets[4], dtype=torch.bfloat16)[offsets[4] :]
                weights, lr = ([], []) if is_lamb else ([published], [1e-2])
                sums = update(*flat, *weights, borders, decays, *lr, *scalars)
                sides.append([one for one in (*flat, published, sums) if one is not None])
            assert_same_bits(*sides)


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, num_threads: int) -> None:
    lengths = [100_001, 3, 60_000, 41]
    one, many = make_shard(lengths, dtype), make_shard(lengths, dtype)
    grad = values(one.master.numel(), 5, dtype, [])
    before = torch.get_num_threads()
    try:
        for shard, count in ((one, 1), (many, num_threads)):
            torch.set_num_threads(count)
            shard.adamw(grad)
    finally:
        torch.set_num_threads(before)

    assert_same_bits(many.tensors, one.tensors)


def test_blocks_of_the_reference_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = []
    for block in (1 << 18, 37):
        monkeypatch.setattr(optimizer_reference, "OPTIMIZER_BLOCK_ELEMENTS_ON_CPU", block)
        shard = make_shard(LAYOUTS["packs"], torch.float32)
        grad = values(shard.master.numel(), 5, torch.float32, [])
        flat = (grad, shard.master, shard.exp_avg, shard.exp_avg_sq, None)
        reference_adamw(*flat, shard.run_borders, shard.is_decayed, 0.1, *SCALARS)
        sides.append(shard.tensors)

    assert_same_bits(*sides)


SCALARS = (0.9, 0.95, 1e-8, 0.1, 0.3, 0.2, 0.7)


def test_the_operator_runs_the_kernel_alone() -> None:
    shard = make_shard([40, 20, 4], torch.float32)
    grad = values(64, 5, torch.float32, [])
    assert adamw_kernel() is not None  # the first call compares it with torch's operations
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        OPS.adamw_(grad, *shard.tensors, None, shard.run_borders, shard.is_decayed, 0.1, *SCALARS)

    assert {event.name for event in trace.events()} == {"megatrain::adamw_"}


@pytest.mark.parametrize("origin", [None, "/nonexistent/_host_kernels.so", __file__])
def test_without_the_library_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    spec = None if origin is None else importlib.util.spec_from_file_location("megatrain._host_kernels", origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr("megatrain.ops.host_kernels.step_kernel", step_kernel.__wrapped__)

    assert adamw_kernel() is None
    assert lamb_direction_kernel() is None


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step_kernel()
    assert run is not None

    def other(pointer: Any) -> None:
        step = pointer._obj
        step.eps = step.eps * 1.5
        run(pointer)

    def load(*arguments: object) -> Callable[[Any], None]:
        return other

    monkeypatch.setattr("megatrain.ops.host_kernels.host_function", load)

    assert step_kernel.__wrapped__() is None
