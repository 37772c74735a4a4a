"""A rank that draws its box of a parameter gets the numbers that the whole parameter has there, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain import rng
from megatrain.rng import box_indices, derive_key, fill_normal_

CPU = torch.device("cpu")
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


@settings(max_examples=150)
@given(box=boxes(), block=st.sampled_from([1, 2, 5, 16, 1 << 20]))
def test_box_has_the_numbers_of_the_whole(box: Any, block: int) -> None:
    shape, offsets, sizes = box
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    expected = whole(shape)[part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "_BLOCK", block)
        found = fill_normal_(torch.empty(sizes), KEY, 0.02, shape, offsets)

    assert torch.equal(found, expected)


@settings(max_examples=100)
@given(box=boxes())
def test_indices_of_a_box_are_flat_positions(box: Any) -> None:
    shape, offsets, sizes = box
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))

    expected = torch.arange(math.prod(shape)).view(shape)[part].flatten()
    assert torch.equal(box_indices(shape, offsets, sizes, CPU), expected)


@pytest.mark.parametrize(
    "shape", [(rng._BLOCK + 3,), (3, rng._BLOCK // 2 - 1), (1, 1, rng._BLOCK + 5), (1, 1100, 1100)]
)
def test_numbers_do_not_depend_on_the_block_borders(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks = whole(shape)
    monkeypatch.setattr(rng, "_BLOCK", 1 << 40)

    assert torch.equal(in_blocks, whole(shape))


@pytest.mark.parametrize("shape", [(5000,), (50, 100), (1, 50, 100), (1, 1, 5000), (2, 1, 2500)])
def test_no_more_than_a_block_is_drawn_at_once(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    hash_indices = rng.hash_indices

    def watched(key: tuple[int, int], index: torch.Tensor) -> torch.Tensor:
        sizes.append(index.numel())
        return hash_indices(key, index)

    monkeypatch.setattr(rng, "_BLOCK", 200)
    monkeypatch.setattr(rng, "hash_indices", watched)
    whole(shape)

    assert sum(sizes) == math.prod(shape)
    assert max(sizes) <= 200


def test_narrow_types_are_the_fp64_numbers_rounded_once() -> None:
    exact = whole((64, 32), torch.float64)

    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(whole((64, 32), dtype), exact.to(dtype))


def test_other_shapes_of_the_same_parameter_share_flat_numbers() -> None:
    assert torch.equal(whole((6, 4)).flatten(), whole((24,)))
