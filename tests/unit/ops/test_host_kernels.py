"""The kernels for CPUs (csrc/host_kernels), compared with the same operators in torch operations.

Those of the optimizer and of the rotation are compared bit by bit. SwiGLU has an exponential function of its own and
RMSNorm another order of additions: their bits must not depend on where an element or a row lies. test_activation.py and
test_normalization.py compare them with fp64, as every implementation.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatrain.ops import activation, normalization, optimizer_reference, rotary
from megatrain.ops.activation_reference import reference_swiglu_backward
from megatrain.ops.extension import host_function
from megatrain.ops.host_optimizer import step_kernel
from megatrain.ops.host_rms_norm import compiled_rms_norm
from megatrain.ops.host_rotary import compiled_rotation
from megatrain.ops.host_swiglu import compiled_swiglu_backward, swiglu_backward_kernel
from megatrain.ops.optimizer_reference import reference_adamw, reference_lamb_direction
from megatrain.ops.rotary_reference import reference_rotate, reference_rotated_backward, reference_split_rotated
from megatrain.ops.square_sums import compiled_square_sum, reference_square_sum
from tests.helpers.kernels import UNDER_TEST
from tests.helpers.optimizer_shards import LAYOUTS, OPS, make_shard
from tests.helpers.require import require
from tests.helpers.waiting import DEADLINE_S

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
SCALARS = (0.9, 0.95, 1e-8, 0.1, 0.3, 0.2, 0.7)
MEMORY_ONLY = tuple(f"aten::{name}" for name in ("as_strided", "empty", "new_empty", "narrow", "slice", "split"))
DECLARING = (activation, normalization, rotary)
"""Their import declares the operators that are tested here."""
FINDING = (step_kernel, compiled_rms_norm, compiled_rotation, compiled_square_sum, swiglu_backward_kernel)
"""The functions that find the kernels."""


@pytest.fixture(scope="module", autouse=True)
def _needs_the_library() -> None:
    if UNDER_TEST.kind != "reference":
        pytest.skip("other kernels take the place of those for CPUs")
    found = importlib.util.find_spec("megatrain._host_kernels")
    require("compiler", found is not None, "megatrain._host_kernels was not built")


@pytest.fixture(autouse=True)
def _keep_the_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(numel: int, seed: int, dtype: torch.dtype, specials: Sequence[int], at: int = 0) -> Tensor:
    """Return random numbers with some special ones, `at` elements after the beginning of their memory."""
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
    assert step_kernel() is not None, "the kernel is not used here: it differs from this torch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_reference, "OPTIMIZER_BLOCK_ELEMENTS_ON_CPU", block)
        updates: list[tuple[Callable[..., Any], Callable[..., Any]]] = [(OPS.adamw_, reference_adamw)]
        if grad_dtype == dtype:
            updates.append((OPS.lamb_direction_, reference_lamb_direction))
        for kernel, reference in updates:
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
    for shard, count in ((one, 1), (many, num_threads)):
        torch.set_num_threads(count)
        shard.adamw(grad)

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


def test_the_operators_run_the_kernels_alone() -> None:
    shard = make_shard([40, 20, 4], torch.float32)
    grad = values(64, 5, torch.float32, [])
    rows = grad[:42].view(2, 21)
    row, rstd = rows[0], rows[:, :1].contiguous()
    product, angles = torch.ones(1, 1, 2, 4, 8), torch.ones(1, 1, 1, 4)
    assert step_kernel() is not None  # the first call compares it with torch's operations
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        OPS.adamw_(grad, *shard.tensors, None, shard.run_borders, shard.is_decayed, 0.1, *SCALARS)
        OPS.swiglu_backward(row, rows)
        OPS.rms_norm(rows, row, 1e-6)
        OPS.add_rms_norm(rows, rows, row, 1e-6)
        OPS.rms_norm_backward(rows, rows, rows, row, rstd)
        OPS.rotate_queries_and_keys_(product, angles, angles)
        OPS.square_sum(grad)
        heads = OPS.split_rotated(product, angles, angles)
        OPS.rotated_backward(*heads, angles, angles)

    own = {event.name for event in trace.events() if event.name.startswith("megatrain::")}
    others = {event.name for event in trace.events()} - own
    assert len(own) == 9  # all but LAMB's, which sums in torch operations
    computing = {name for name in others if not name.startswith(MEMORY_ONLY)}
    assert computing <= {"aten::sum", "aten::fill_"}, computing  # of the blocks of a weight's gradient


def swiglu_inputs(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return x [rows, 2, columns] with special values, and a gradient of the result."""
    x = values(rows * 2 * columns, 3, torch.float32, range(len(SPECIAL))).view(rows, 2, columns)
    return x.to(dtype), values(rows * columns, 4, torch.float32, []).view(rows, columns).to(dtype)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("rows", "columns"), [(slice(None), slice(None)), (slice(7, 402), slice(3, 300))])
def test_bits_of_swiglu_backward_depend_on_no_other_element(rows: slice, columns: slice, num_threads: int) -> None:
    x, grad = swiglu_inputs(523, 331)
    torch.set_num_threads(1)
    whole = OPS.swiglu_backward(grad, x)
    torch.set_num_threads(num_threads)
    part, part_grad = x[rows, :, columns].contiguous(), grad[rows, columns].contiguous()
    found = OPS.swiglu_backward(part_grad, part)

    assert_same_bits([found], [whole[rows, :, columns].contiguous()])


@pytest.mark.parametrize("shape", [(1, 1, 1, 3, 2), (7, 2, 3, 3, 6), (9, 2, 2, 4, 46), (130, 3, 5, 4, 64)])
@pytest.mark.parametrize("num_threads", [1, 5])
def test_rotation_kernel_has_the_bits_of_torch(shape: tuple[int, ...], num_threads: int) -> None:
    positions, _, _, heads, units = shape
    product = values(math.prod(shape), 3, torch.float32, range(len(SPECIAL))).view(shape)
    cos, sin = (torch.randn(positions, 1, 1, units // 2, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    # the layout of the gradients of attention: heads before positions
    by_head = [product[..., :count, :].permute(1, 2, 3, 0, 4).contiguous() for count in (heads - 2, 1, 1)]
    grads = [grad.permute(3, 0, 1, 2, 4) for grad in by_head]
    torch.set_num_threads(num_threads)
    in_place, expected_in_place = product.clone(), product.clone()
    OPS.rotate_queries_and_keys_(in_place, cos, sin)
    found = [in_place, *OPS.split_rotated(product, cos, sin), OPS.rotated_backward(*grads, cos, sin)]

    reference_rotate(expected_in_place, cos, sin)
    grad_q, grad_k, grad_v = grads
    expected = [
        *reference_split_rotated(product, cos, sin),
        reference_rotated_backward(grad_q, grad_k, grad_v, cos, sin),
    ]
    assert_same_bits(found, [expected_in_place, *expected])


def norm_results(x: Tensor, added: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the results of all three operators; the gradients are those of rows of `added`."""
    out, rstd = OPS.rms_norm(x, weight, 1e-6)
    sum_out, total, sum_rstd = OPS.add_rms_norm(x, added, weight, 1e-6)
    grad_x, grad_weight = OPS.rms_norm_backward(added, x, total, weight, sum_rstd)
    alone, _ = OPS.rms_norm_backward(added, None, x, weight, rstd)
    return [out, rstd, sum_out, total, sum_rstd, grad_x, alone, grad_weight]


@pytest.mark.parametrize("columns", [1, 15, 331, 512])
def test_bits_of_rms_norm_depend_on_no_other_row(columns: int) -> None:
    # enough blocks of rows that torch's last sum over them may be parallel
    x, added = (torch.randn(1_100, columns, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    weight = values(columns, 5, torch.float32, [])
    of_threads = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        of_threads.append(norm_results(x, added, weight))
    rows = norm_results(x[7:402], added[7:402], weight)[:-1]

    assert_same_bits(of_threads[1], of_threads[0])
    assert_same_bits(of_threads[2], of_threads[0])
    assert_same_bits(rows, [whole[7:402] for whole in of_threads[0][:-1]])


@pytest.mark.parametrize("length", [1, 65_551, 700_003])
def test_square_sum_has_one_order_of_additions(length: int) -> None:
    flat = torch.randn(length, generator=torch.Generator().manual_seed(6))
    sums = set()
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        sums.add(OPS.square_sum(flat).item())

    assert len(sums) == 1
    assert sums.pop() == pytest.approx(reference_square_sum(flat).item(), rel=1e-14)


def test_swiglu_gradient_is_exact_to_six_roundings() -> None:
    gate = torch.linspace(-87, 87, 100_003)
    x, grad = torch.stack([gate, torch.full_like(gate, 0.7)]), torch.full_like(gate, 1.3)
    exact = reference_swiglu_backward(grad.double(), x.double())[1]

    error = (OPS.swiglu_backward(grad, x)[1].double() - exact).abs() / exact.abs().clamp_min(torch.finfo(x.dtype).tiny)
    assert error.max().item() < 6 * 2**-24


def test_swiglu_of_special_values_has_torchs_gradient() -> None:
    gate = torch.tensor([*SPECIAL, *(sign * size for size in (1e4, 104.0, 90.0, 88.0, 1e-20) for sign in (-1, 1))])
    x, grad = torch.stack([gate, torch.full_like(gate, -3.0)]), torch.full_like(gate, 2.0)

    expected = reference_swiglu_backward(grad, x)
    torch.testing.assert_close(OPS.swiglu_backward(grad, x), expected, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_of_other_dtypes_is_the_reference(dtype: torch.dtype) -> None:
    x, grad = swiglu_inputs(5, 19, dtype)

    assert_same_bits([OPS.swiglu_backward(grad, x)], [reference_swiglu_backward(grad, x)])


@pytest.mark.parametrize("origin", [None, "/nonexistent/_host_kernels.so", __file__])
def test_without_the_library_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    spec = None if origin is None else importlib.util.spec_from_file_location("megatrain._host_kernels", origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    for find in FINDING:
        assert find.__wrapped__() is None, find


def test_swiglu_without_fused_instructions_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    # the flag stays 0
    monkeypatch.setattr("megatrain.ops.host_swiglu.host_function", lambda *arguments: lambda pointer: None)

    assert swiglu_backward_kernel.__wrapped__() is None
    assert compiled_swiglu_backward() is not None


THREADS = """
import os, torch
from megatrain.ops import normalization
torch.set_num_threads(8)
x, weight = torch.ones(160, 512), torch.ones(512)  # two parts
large = torch.ones(1 << 20)
large.add_(1)
threads = set(os.listdir("/proc/self/task"))
for _ in range(3):
    torch.ops.megatrain.rms_norm(x, weight, 1e-6)
    large.add_(1)
    assert set(os.listdir("/proc/self/task")) == threads
assert len(threads) >= 8, threads
"""


def test_kernel_in_fewer_parts_keeps_the_threads_of_torch() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=DEADLINE_S)


SIZES = ("optimizer_step", "rms_norm", "rotate", "square_sum", "swiglu_backward")


@pytest.mark.parametrize("difference", [-4, 0, 8])
@pytest.mark.parametrize("name", SIZES)
def test_function_for_a_struct_of_another_size_is_not_used(name: str, difference: int) -> None:
    spec = importlib.util.find_spec("megatrain._host_kernels")
    assert spec is not None
    assert spec.origin is not None
    stated = ctypes.c_int64.in_dll(ctypes.CDLL(spec.origin), f"megatrain_{name}_size").value

    class Argument(ctypes.Structure):
        _fields_ = (("content", ctypes.c_char * (stated + difference)),)

    function = host_function("megatrain._host_kernels", f"megatrain_{name}", [ctypes.POINTER(Argument)])
    assert (function is None) == (difference != 0)


def test_function_without_a_stated_size_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Argument(ctypes.Structure):
        _fields_ = (("content", ctypes.c_char),)

    spec = ModuleSpec("libc", None, origin="libc.so.6")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert host_function("libc", "free", [ctypes.c_void_p]) is not None
    assert host_function("libc", "free", [ctypes.POINTER(Argument)]) is None


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step_kernel()
    assert run is not None

    def other(pointer: Any) -> None:
        step = pointer._obj
        step.eps = step.eps * 1.5
        run(pointer)

    monkeypatch.setattr("megatrain.ops.host_optimizer.compiled_step", lambda: other)

    assert step_kernel.__wrapped__() is None
