"""Cutting a box where others begin: the pieces follow each other in its row-major data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.conversion.parts import bands
from megatrain.parallel.boxes import Box, shared_box


def positions(box: Box, whole: Box) -> list[int]:
    """Return where the elements of a box are in the row-major data of the whole."""
    strides = [math.prod(whole.sizes[dim + 1 :]) for dim in range(len(whole.sizes))]
    found = [0]
    for offset, size, first, stride in zip(box.offsets, box.sizes, whole.offsets, strides, strict=True):
        found = [at + (offset + index - first) * stride for at in found for index in range(size)]
    return found


def test_a_column_slice_of_rows_is_cut_by_rows() -> None:
    stored = [Box((row, 0), (4, 8)) for row in range(0, 12, 4)]
    assert list(bands(Box((2, 4), (8, 2)), stored)) == [
        Box((2, 4), (2, 2)), Box((4, 4), (4, 2)), Box((8, 4), (2, 2)),
    ]  # fmt: skip


def test_single_rows_are_cut_further() -> None:
    stored = [Box((row, column), (1, 4)) for row in range(2) for column in (0, 4)]
    assert list(bands(Box((0, 2), (2, 4)), stored)) == [
        Box((0, 2), (1, 2)), Box((0, 4), (1, 2)), Box((1, 2), (1, 2)), Box((1, 4), (1, 2)),
    ]  # fmt: skip


def test_adjacent_boxes_are_not_cut() -> None:
    box = Box((0, 0), (6, 8))
    assert list(bands(box, [Box((0, 0), (6, 4)), Box((0, 4), (6, 4))])) == [box]
    assert list(bands(Box((), ()), [Box((), ())])) == [Box((), ())]


BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=3, max_size=3).map(
    lambda dims: Box(tuple(offset for offset, _ in dims), tuple(size for _, size in dims))
)


@pytest.mark.slow
@given(BOXES, st.lists(BOXES, max_size=6))
def test_pieces_are_the_box_in_the_order_of_its_data(box: Box, stored: list[Box]) -> None:
    pieces = list(bands(box, stored))
    assert [at for piece in pieces for at in positions(piece, box)] == list(range(box.numel))
    for piece in pieces:
        assert shared_box(piece, box) == piece
