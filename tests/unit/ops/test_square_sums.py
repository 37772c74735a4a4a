"""The sum of squares in fp64, compared with torch's and with exact sums."""

from __future__ import annotations

import math

import pytest
import torch

from megatrain.ops.square_sums import square_sum
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.operator_contract import assert_contract, assert_refused

SUM = torch.ops.megatrain.square_sum.default
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# less than a pack, than a thread's packs, than a tile; whole tiles; more tiles than the last block has threads
LENGTHS = [1, 7, 123, 8191, 8192, 8200, 24576, 70001]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_has_the_digits_of_fp64(dtype: torch.dtype) -> None:
    for length in LENGTHS:
        flat = draw(length, dtype=dtype)
        exact = math.fsum(x * x for x in flat.tolist())
        found = square_sum(flat)
        assert found.dtype == torch.float64
        assert found.shape == ()
        assert found.item() == pytest.approx(exact, rel=1e-13), length


def test_every_element_counts_once() -> None:
    for dtype in DTYPES:
        for place in (0, 5000, 8192, 8199):
            flat = torch.zeros(8200, dtype=dtype, device=UNDER_TEST.device)
            flat[place] = 3.0
            assert square_sum(flat).item() == 9.0, (place, dtype)


def test_parts_of_more_tiles_than_threads_are_added() -> None:
    flat = torch.zeros(8192 * 1026, dtype=torch.bfloat16, device=UNDER_TEST.device)
    flat[::8192] = 1.0
    flat[1023 * 8192 :: 8192] = torch.tensor([2.0, 4.0, 8.0], dtype=flat.dtype, device=flat.device)

    assert square_sum(flat).item() == 1023 + 4 + 16 + 64


def test_large_and_small_elements_lose_nothing() -> None:
    flat = torch.tensor([1e20, -3e-25, 4097.0], device=UNDER_TEST.device)  # fp32, which cannot represent their squares

    assert square_sum(flat[:1]).item() == flat[0].item() ** 2
    assert square_sum(flat[1:2]).item() == flat[1].item() ** 2
    assert square_sum(flat[2:]).item() == 4097**2


def test_square_sums_of_infinities_and_nans_stay_visible() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 4095, 8998):
            flat = draw(8999, dtype=torch.float32)
            flat[place] = bad
            found = square_sum(flat).item()
            assert math.isnan(found) if math.isnan(bad) else found == math.inf, (bad, place)


@pytest.mark.slow(kept=["8191-dtype0", "8191-dtype3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_square_sum_keeps_the_contract(length: int, dtype: torch.dtype) -> None:
    flat = draw(length, dtype=dtype)
    before = flat.clone()

    assert_contract(SUM, flat)
    assert torch.equal(flat, before)
    if length == 0:
        assert square_sum(flat).item() == 0.0


def test_square_sum_refuses_wrong_inputs() -> None:
    assert_refused(SUM, (draw(2, 3),), r"flat must have one dim, got \[2, 3\]")
    with pytest.raises(RuntimeError, match="flat must be contiguous"):
        SUM(draw(6)[::2])
    assert_refused(SUM, (draw(6).long(),), "flat must be bf16, fp16, fp32 or fp64, got int64")
