"""A rank that draws its box of a parameter gets the numbers of the whole parameter in that box, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.rng import box_indices, derive_key, fill_normal_

CPU = torch.device("cpu")
BLOCK = 1 << 20
"""The number of elements that are drawn at once."""
KEY = derive_key("weights", 3, "blocks.0.attention.qkv.weight")


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return fill_normal_(torch.empty(shape, dtype=dtype), KEY, 0.02, shape, (0,) * len(shape))


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Draw (shape, offsets, sizes) of 1 to 4 dims."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, length - 1)) for length in shape)
    sizes = tuple(draw(st.integers(1, length - offset)) for length, offset in zip(shape, offsets, strict=True))
    return shape, offsets, sizes


@settings(max_examples=60)
@given(box=boxes())
def test_box_has_the_numbers_of_the_whole(box: Any) -> None:
    shape, offsets, sizes = box
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    expected = whole(shape)[part]
    assert torch.equal(fill_normal_(torch.empty(sizes), KEY, 0.02, shape, offsets), expected)


@settings(max_examples=50)
@given(box=boxes())
def test_indices_of_a_box_are_flat_positions(box: Any) -> None:
    shape, offsets, sizes = box
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))

    expected = torch.arange(math.prod(shape)).view(shape)[part].flatten()
    assert torch.equal(box_indices(shape, offsets, sizes, CPU), expected)


class Temporaries(TorchDispatchMode):
    """Records the size of the largest int64 or fp64 tensor that is allocated. Blocks limit the size of these."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and made.dtype in (torch.int64, torch.float64):
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.slow(kept=["some rows at once", "a box of 4 dims"])
@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        pytest.param((BLOCK + 3,), (0,), (BLOCK + 3,), id="1 dim"),
        pytest.param((3, BLOCK // 2 - 1), (0, 0), (3, BLOCK // 2 - 1), id="some rows at once"),
        pytest.param((1, 1, BLOCK + 5), (0, 0, 0), (1, 1, BLOCK + 5), id="a row of its own"),
        pytest.param((2, 3, 2, 300_000), (1, 1, 0, 7), (1, 2, 2, 290_000), id="a box of 4 dims"),
    ],
)
def test_large_box_has_the_numbers_of_its_parts(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    found = torch.empty(sizes)
    with Temporaries() as temporaries:
        fill_normal_(found, KEY, 0.02, shape, offsets)
    assert BLOCK // 3 < temporaries.largest <= BLOCK

    first = 0
    for part in found.chunk(3, dim=-1):
        expected = torch.empty(part.shape)
        fill_normal_(expected, KEY, 0.02, shape, (*offsets[:-1], offsets[-1] + first))
        assert torch.equal(part, expected)
        first += part.shape[-1]


def test_narrow_types_are_the_fp64_numbers_rounded_once() -> None:
    exact = whole((64, 32), torch.float64)

    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(whole((64, 32), dtype), exact.to(dtype))


def test_other_shapes_of_the_same_parameter_share_flat_numbers() -> None:
    assert torch.equal(whole((6, 4)).flatten(), whole((24,)))
