"""FP8 quantization compared with torch's own conversion, value by value."""

from __future__ import annotations

import pytest
import torch

from megatrain.ops.quantization import E4M3, E5M2, fp8_quantize, fp8_quantize_columns, fp8_quantize_rows, fp8_scale
from tests.helpers.kernels import draw, on_device
from tests.helpers.operator_contract import assert_contract, assert_refused

FORMATS = [E4M3, E5M2]
# tiles that are whole, or cut by one or both edges; sizes that are no multiple of a pack, along one dim or both;
# several parts of rows
SHAPES = [(128, 256), (16, 16), (144, 48), (7, 123), (1, 1), (130, 129), (3, 1000), (16, 123), (123, 16), (600, 7)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_fp8_rounding_of_all_numbers_and_midpoints_is_torchs(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = codes[codes.isfinite()].sort().values.unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = torch.cat([middles * (1 + 1e-6), middles * (1 - 1e-6)])
    x = on_device(torch.cat([numbers, middles, beside, -numbers * 0.999]))[None, :]
    one = on_device(torch.ones(1))

    found = fp8_quantize(x, one, dtype, True, True)
    expected = x.to(dtype)
    assert torch.equal(found[0].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(found[1].view(torch.uint8), expected.t().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_quantized_values_are_the_scaled_ones(kind: torch.dtype, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = draw(*shape, dtype=kind, scale=3.0)
        scale = fp8_scale(x, dtype)
        q, q_t, largest = fp8_quantize(x, scale, dtype, True, True)
        expected = (x.float() * scale[0]).to(dtype)
        assert scale[0].item() == pytest.approx(torch.finfo(dtype).max / x.abs().max().item(), rel=1e-6), shape
        assert scale[1].item() == pytest.approx(1 / scale[0].item(), rel=1e-6), shape
        assert torch.equal(q.float(), expected.float()), shape
        assert torch.equal(q_t.float(), expected.float().t()), shape
        assert largest.max().item() == x.abs().max().item(), shape


def test_the_largest_of_many_may_be_anywhere() -> None:
    x = on_device(torch.zeros(80001))
    for place in [*range(0, 80001, 6000), 80000]:
        x[place] = 3.0
        assert fp8_scale(x, E4M3)[0].item() == pytest.approx(448 / 3)
        x[place] = 0.0


def test_the_largest_of_a_row_may_be_anywhere() -> None:
    x = on_device(3 * torch.eye(258, dtype=torch.bfloat16).repeat_interleave(8, dim=1))
    _, inverse = fp8_quantize_rows(x, E4M3)

    torch.testing.assert_close(inverse, torch.full_like(inverse, 3 / 448))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_each_row_and_each_column_has_its_own_scale(kind: torch.dtype) -> None:
    for shape in SHAPES:
        x = draw(*shape, dtype=kind) * (10.0 ** draw(shape[0], 1, seed=1)).to(kind)  # rows of very different magnitude
        q, inverse = fp8_quantize_rows(x, E4M3)
        q_t, inverse_t = fp8_quantize_columns(x, E4M3)
        assert torch.allclose(inverse[:, 0], x.abs().amax(1).float() / 448, rtol=1e-6, atol=0), shape
        assert torch.allclose(inverse_t[:, 0], x.abs().amax(0).float() / 448, rtol=1e-6, atol=0), shape
        # the error is at most half a unit of the last of 3 bits, or of the smallest subnormal number of that row
        for found, original, unit in ((q, x, inverse), (q_t, x.t(), inverse_t)):
            error = (found.float() * unit - original.float()).abs()
            assert (error <= original.float().abs() / 16 + unit * 2.0**-10 * 1.01).all(), shape


@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    x = draw(16, 16, dtype=torch.bfloat16) * 0

    assert fp8_scale(x, dtype).tolist() == [1.0, 1.0]
    assert not fp8_quantize_rows(x, dtype)[0].float().any()
    assert not fp8_quantize_columns(x, dtype)[0].float().any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_small_numbers_are_not_scaled_to_infinity(dtype: torch.dtype) -> None:
    """An inactive unit has such numbers. The format's maximum divided by them exceeds the range of fp32."""
    for size in (1e-35, 1e-36, 1e-37):
        x = 1.0 + draw(16, 48, dtype=torch.float32).abs()
        x *= size
        scale = fp8_scale(x, dtype)
        whole, _, _ = fp8_quantize(x, scale, dtype, True, False)
        rows, inverse = fp8_quantize_rows(x, dtype)
        columns, inverse_t = fp8_quantize_columns(x, dtype)
        for found, expected, unit in ((whole, x, scale[1]), (rows, x, inverse), (columns, x.t(), inverse_t)):
            assert (unit >= torch.finfo(torch.float32).tiny).all(), size
            assert torch.allclose(found.double() * unit, expected.double(), rtol=0.13, atol=0.0), size


def test_quantization_at_an_address_that_is_no_multiple_of_32() -> None:
    base = draw(4 + 16 * 48, dtype=torch.float32)
    one = on_device(torch.ones(1))
    x = base[4:].view(16, 48)  # a multiple of 16 bytes, but not of 32

    expected = x.to(E4M3)
    q, q_t, _ = fp8_quantize(x, one, E4M3, True, True)
    assert torch.equal(q.float(), expected.float())
    assert torch.equal(q_t.float(), expected.float().t())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_quantized_infinities_and_nans_stay_visible(bad: float, dtype: torch.dtype) -> None:
    x = draw(32, 48, dtype=torch.float32)
    x[5, 6:8] = bad
    q, q_t, largest = fp8_quantize(x, on_device(torch.ones(1)), dtype, True, True)

    assert q.float().isnan().nonzero().tolist() == [[5, 6], [5, 7]]
    assert q_t.float().isnan().nonzero().tolist() == [[6, 5], [7, 5]]
    assert not largest.max().isfinite()
    assert not (
        fp8_quantize(x, fp8_scale(x, dtype), dtype, True, False)[0].float()[5, 7] * fp8_scale(x, dtype)[1]
    ).isfinite()
    rows, inverse = fp8_quantize_rows(x, dtype)
    assert not (rows.float() * inverse)[5, 7].isfinite()
    assert (rows.float() * inverse)[:5].isfinite().all()


@pytest.mark.slow(kept=["shape2-kind0-dtype0", "shape2-kind1-dtype1"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(144, 48), (7, 123), (1, 1), (0, 16), (16, 0)])
def test_quantization_keeps_the_contract(shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=kind)
    scale = fp8_scale(x, dtype)

    assert_contract(fp8_scale, x, dtype)
    assert_contract(fp8_quantize, x, scale, dtype, True, True)
    assert_contract(fp8_quantize, x, scale, dtype, True, False)
    assert_contract(fp8_quantize, x, scale, dtype, False, True)
    assert_contract(fp8_quantize_rows, x, dtype)
    assert_contract(fp8_quantize_columns, x, dtype)


def test_quantization_refuses_wrong_inputs() -> None:
    x, scale = draw(16, 16, dtype=torch.float32), on_device(torch.ones(2))

    assert_refused(fp8_quantize, (x.double(), scale, E4M3, True, True), "x must be bf16, fp16 or fp32, got float64")
    assert_refused(
        fp8_quantize, (x, scale, torch.bfloat16, True, True), "dtype must be float8_e4m3fn or float8_e5m2, got"
    )
    assert_refused(fp8_quantize, (x, scale.double(), E4M3, True, True), "scale must be float32, got float64")
    assert_refused(fp8_scale, (x.t()[1:], E4M3), "x must be contiguous")
    assert_refused(fp8_quantize, (x, scale[:0], E4M3, True, True), "scale must have a number")
    assert_refused(fp8_quantize, (x[0], scale, E4M3, True, True), r"x must be \[rows, columns\], got \[16\]")
    assert_refused(fp8_quantize_rows, (x[0], E4M3), r"x must be \[rows, columns\], got \[16\]")
    assert_refused(fp8_quantize_columns, (x.t()[1:], E4M3), "x must be contiguous")
    many = on_device(torch.empty(65535 * 128 + 1, 0))
    assert_refused(fp8_quantize_columns, (many, E4M3), r"x must have at most 8388480 rows, got \[8388481, 0\]")
