"""A flat range of a row-major tensor is at most 2 N - 1 boxes: exactly its elements, in order, each box contiguous."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.parallel.boxes import Box, boxes_of_range


@st.composite
def ranges(draw: Any) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


def cut(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))]


@settings(max_examples=100)
@given(ranges())
@example(((3, 1, 4), 0, 12))
@example(((1, 1, 1), 0, 1))
@example(((5, 4, 3), 1, 59))
@example(((2, 3, 4, 5), 7, 113))
def test_boxes_are_the_elements_of_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(math.prod(shape)).view(shape)
    found = list(boxes_of_range(shape, start, stop))

    parts = [cut(whole, box) for _, box in found]
    assert torch.cat([part.flatten() for part in parts] or [torch.zeros(0)]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1
    for (position, box), part in zip(found, parts, strict=True):
        assert part.is_contiguous()
        assert tuple(part.shape) == box.sizes
        assert box.numel == part.numel() > 0
        assert part.flatten()[0].item() == position


@settings(max_examples=50)
@given(ranges())
def test_no_two_neighboring_boxes_could_be_one(case: tuple[tuple[int, ...], int, int]) -> None:
    """At no start of a box does a longer axis-aligned box of the range start."""
    shape, start, stop = case
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for position, box in boxes_of_range(shape, start, stop):
        for dim, stride in enumerate(strides):
            is_aligned = position % stride == 0
            largest = min(shape[dim] - position // stride % shape[dim], (stop - position) // stride)
            assert not is_aligned or box.numel >= largest * stride


def test_boxes_at_the_limits() -> None:
    assert list(boxes_of_range((4, 3, 2), 0, 24)) == [(0, Box((0, 0, 0), (4, 3, 2)))], "the whole tensor"
    assert len(list(boxes_of_range((4, 4, 4), 1, 63))) == 5, "the most boxes"
    assert not list(boxes_of_range((4, 3), 7, 7)), "an empty range"
    assert not list(boxes_of_range((), 0, 0)), "an empty range of a scalar"
    assert list(boxes_of_range((), 0, 1)) == [(0, Box((), ()))], "a scalar"


def test_boxes_of_huge_tensors_take_no_time() -> None:
    shape = (12288, 49152, 3)
    found = list(boxes_of_range(shape, 12345678901 % math.prod(shape), math.prod(shape) - 5))

    assert len(found) <= 5
    assert sum(box.numel for _, box in found) == math.prod(shape) - 5 - 12345678901 % math.prod(shape)


def test_shifted_box_has_moved_offsets() -> None:
    assert Box((1, 2), (3, 4)).shifted((10, 0)) == Box((11, 2), (3, 4))
