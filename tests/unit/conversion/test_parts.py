"""Division of a box at the borders of others: the pieces are consecutive in its row-major data.

Files that share stored items are converted in an order in which each item is read once, whatever the memory for items.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.conversion.parts import WriteOrder, bands
from megatrain.parallel.boxes import Box, shared_box


def positions(box: Box, whole: Box) -> list[int]:
    """Return the places of a box's elements in the row-major data of the whole."""
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


def play(needs: Sequence[Sequence[set[int]]], num_kept: int) -> tuple[list[int], list[int]]:
    """Convert the files with memory for `num_kept` items. Return the order of the files and of the reads."""
    write_order, kept, reads, order = WriteOrder(needs), OrderedDict[int, None](), [], []
    at = [0] * len(needs)
    while (file := write_order.take(lambda number: number in kept)) is not None:
        for number in sorted(needs[file][at[file]]):
            if number not in kept:
                reads.append(number)
                while len(kept) >= num_kept:
                    kept.popitem(last=False)
            kept[number] = None
            kept.move_to_end(number)
        at[file] += 1
        order.append(file)
    assert at == [len(parts) for parts in needs], "every part is used in turn"
    return order, reads


def chain(*numbers: int) -> list[set[int]]:
    return [{number} for number in numbers]


def test_files_that_need_the_same_go_side_by_side() -> None:
    order, reads = play([chain(0, 1, 2, 3)] * 4, num_kept=1)
    assert reads == [0, 1, 2, 3]
    assert sorted(order) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_a_file_waits_where_another_ends() -> None:
    """As data-parallel shards of two buckets: a shard begins in the item in which the previous one ends."""
    needs = [chain(0, 1, 2, 10, 11, 12), chain(2, 3, 4, 12, 13), chain(4, 5, 13, 14)]
    assert play(needs, num_kept=1)[1] == sorted({number for parts in needs for part in parts for number in part})


def test_a_part_that_needs_several_keeps_them() -> None:
    """As a layout of two tensor-parallel ranks that is merged into one: an item covers a half of both ranks' items."""
    needs = [[{0, 1}, {0, 1}, {2, 3}, {2, 3}]]
    assert play(needs, num_kept=2)[1] == [0, 1, 2, 3]


def test_opposite_orders_end_too() -> None:
    order, reads = play([chain(0, 1), chain(1, 0)], num_kept=2)
    assert sorted(order) == [0, 0, 1, 1]
    assert sorted(reads) == [0, 1]
    assert sorted(set(play([chain(0, 1), chain(1, 0)], num_kept=1)[1])) == [0, 1]


def test_files_without_parts_take_no_turn() -> None:
    assert play([], num_kept=1)[0] == play([[]], num_kept=1)[0] == []
    assert play([[], chain(0), []], num_kept=1)[0] == [1]


@pytest.mark.slow
@given(st.data())
def test_common_order_reads_each_file_once(data: st.DataObject) -> None:
    """Files whose items have one common order: each item is read once, with memory for those of one part."""
    num_items = data.draw(st.integers(1, 30))
    needs = []
    for _ in range(data.draw(st.integers(1, 6))):
        some = data.draw(st.lists(st.integers(0, num_items - 1), max_size=20))
        needs.append(chain(*sorted(some)))
    _, reads = play(needs, num_kept=1)
    assert sorted(reads) == sorted({number for parts in needs for part in parts for number in part})


@pytest.mark.slow
@given(st.lists(st.lists(st.sets(st.integers(0, 8), min_size=1, max_size=3), max_size=8), max_size=5))
def test_any_order_ends(needs: list[list[set[int]]]) -> None:
    reads = play(needs, num_kept=3)[1]
    assert set(reads) == {number for parts in needs for part in parts for number in part}
