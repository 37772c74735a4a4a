"""The boxes of tensors: which are covered, and which rank owns each part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.checkpoint.box_cover import first_gap, first_overlap, region_text
from megatrain.checkpoint.ownership import SavedShard, divide
from megatrain.parallel.boxes import Box, shared_box
from megatrain.parallel.placement import SOLE_HOLDER, ShardHolders
from megatrain.parallel.sharding import FlatShard


@st.composite
def boxes_of_a_tensor(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        bounds = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    return shape, boxes


def mask(shape: tuple[int, ...], box: Box) -> Tensor:
    marked = torch.zeros(shape, dtype=torch.bool)
    marked[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] = True
    return marked


@pytest.mark.slow
@settings(max_examples=150)
@given(boxes_of_a_tensor())
def test_overlaps_and_gaps_are_those_of_the_masks(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    masks = [mask(shape, box) for box in boxes]
    for one, one_mask in zip(boxes, masks, strict=True):
        for other, other_mask in zip(boxes, masks, strict=True):
            shared = shared_box(one, other)
            expected = one_mask & other_mask
            assert torch.equal(
                expected, torch.zeros(shape, dtype=torch.bool) if shared is None else mask(shape, shared)
            )

    count = torch.stack([torch.zeros(shape, dtype=torch.long), *(marked.long() for marked in masks)]).sum(0)
    overlap = first_overlap(boxes)
    assert (overlap is not None) == bool((count > 1).any())
    if overlap is not None:
        assert overlap[0] < overlap[1]
        assert shared_box(boxes[overlap[0]], boxes[overlap[1]]) is not None
        return
    whole = Box((0,) * len(shape), shape)
    gap = first_gap(whole, boxes)
    if gap is None:
        assert bool((count == 1).all())
    else:
        assert gap.numel > 0
        assert not bool((count[mask(shape, gap)]).any())
        first = tuple(torch.nonzero(count == 0)[0].tolist())
        assert gap.offsets == first


def test_gap_among_many_parts_is_found() -> None:
    """Pieces that share elements would double in number with each part."""
    cells = [(row, column) for row in range(14) for column in range(14)]
    parts = [Box(cell, (1, 1)) for cell in cells if sum(cell) % 2]
    assert first_gap(Box((0, 0), (14, 14)), parts) == Box((0, 0), (1, 1))


def test_a_region_is_written_as_it_is_indexed() -> None:
    assert region_text(Box((3, 0), (2, 7))) == "[3:5, 0:7]"
    assert region_text(Box((), ())) == "[]"


def shard(name: str, size: int, holders: ShardHolders = SOLE_HOLDER) -> SavedShard:
    return SavedShard("master", FlatShard(name, (size,), Box((0,), (size,)), torch.zeros(size), holders))


def names(shards: list[SavedShard]) -> list[str]:
    return [one.shard.name for one in shards]


def test_state_of_one_rank_is_its_own() -> None:
    owned, others = divide([shard("a", 3), shard("b", 4)])
    assert (names(owned), others) == (["a", "b"], [])


def test_copies_divide_by_bytes_and_agree() -> None:
    sizes = {"a": 8, "b": 3, "c": 3, "d": 3, "e": 5}
    by_rank = []
    for index in range(2):
        shards = [shard("mine", 100)] + [
            shard(name, size, ShardHolders(("tp",), index, 2)) for name, size in sizes.items()
        ]
        by_rank.append(divide(shards))
    assert names(by_rank[0][0]) == ["mine", "a", "e"]
    assert names(by_rank[1][0]) == ["mine", "b", "c", "d"]
    for (owned, _), (_, others) in (by_rank, by_rank[::-1]):
        assert names(owned)[1:] == names(others)


def test_groups_are_counted_apart() -> None:
    # The end stages have different norms, and still agree on the embedding.
    first = divide(
        [shard("norm", 9, ShardHolders(("tp",), 0, 2)), shard("word", 4, ShardHolders(("embedding",), 0, 2))]
    )
    last = divide(
        [shard("word", 4, ShardHolders(("embedding",), 1, 2)), shard("other", 9, ShardHolders(("tp",), 0, 2))]
    )
    assert names(first[0]) == ["norm", "word"]
    assert names(last[1]) == ["word"]
