"""A state saved by any layout can be loaded by any layout: every wanted element from exactly one item, each item read
by one rank."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.checkpoint.gathered_items import stored_by_ranks
from megatrain.checkpoint.image import key_of, plan_image
from megatrain.checkpoint.load_plan import NO_READER, ItemCatalog, WantedBox, assign_readers, plan_load
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensor
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box, boxes_of_range, shared_box
from megatrain.parallel.sharding import FlatShard
from tests.helpers.images import image_bytes

KINDS = ("master", "exp_avg")
Shards = list[tuple[str, FlatShard]]


@dataclass(frozen=True)
class TensorCut:
    """The division of one tensor: boxes along one dim, each flattened into a padded bucket that dp ranks share."""

    dim: int
    tp_bounds: tuple[int, ...]
    bucket_start: int
    share_multiple: int


@dataclass(frozen=True)
class CutLayout:
    tp_size: int
    dp_size: int
    cuts: tuple[TensorCut, ...]
    max_item_bytes: int


@st.composite
def layouts(draw: Any, shapes: Sequence[tuple[int, ...]]) -> CutLayout:
    tp_size, dp_size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    cuts = []
    for shape in shapes:
        dim = draw(st.integers(0, max(0, len(shape) - 1)))
        length = shape[dim] if shape else 1
        inner = sorted(draw(st.lists(st.integers(0, length), min_size=tp_size - 1, max_size=tp_size - 1)))
        multiple = draw(st.sampled_from([1, 3, 8]))
        cuts.append(TensorCut(dim, (0, *inner, length), draw(st.integers(0, 9)), multiple))
    return CutLayout(tp_size, dp_size, tuple(cuts), draw(st.sampled_from([4, 12, 40, 64 << 20])))


@st.composite
def cases(draw: Any) -> tuple[tuple[tuple[int, ...], ...], CutLayout, CutLayout]:
    shape = st.lists(st.integers(1, 5), max_size=4).map(tuple)
    shapes = tuple(draw(st.lists(shape, min_size=1, max_size=2)))
    return shapes, draw(layouts(shapes)), draw(layouts(shapes))


def local_box(shape: tuple[int, ...], cut: TensorCut, tp_rank: int) -> Box | None:
    """Return the box of a tp rank; a scalar belongs to the first rank."""
    first, last = cut.tp_bounds[tp_rank : tp_rank + 2]
    if first == last:
        return None
    if not shape:
        return Box((), ())
    offsets = [0] * len(shape)
    offsets[cut.dim] = first
    return Box(tuple(offsets), (*shape[: cut.dim], last - first, *shape[cut.dim + 1 :]))


def part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))]


def state_of(layout: CutLayout, wholes: dict[tuple[str, int], Tensor], tp_rank: int, dp_rank: int) -> Shards:
    """Return the state of one rank: boxes that are views of a flat shard with padding, as a bucket's are."""
    state: Shards = []
    for (kind, number), whole in wholes.items():
        cut, shape = layout.cuts[number], tuple(whole.shape)
        box = local_box(shape, cut, tp_rank)
        if box is None:
            continue
        end = cut.bucket_start + box.numel
        share = -(-end // (layout.dp_size * cut.share_multiple)) * cut.share_multiple
        bucket = torch.full((share * layout.dp_size,), -1, dtype=whole.dtype)
        bucket[cut.bucket_start : end] = part(whole, box).reshape(-1)
        memory = bucket[dp_rank * share : (dp_rank + 1) * share].clone()
        start = max(cut.bucket_start, dp_rank * share)
        stop = min(end, (dp_rank + 1) * share)
        for position, piece in boxes_of_range(box.sizes, start - cut.bucket_start, max(start, stop) - cut.bucket_start):
            first = cut.bucket_start + position - dp_rank * share
            view = memory[first : first + piece.numel].view(piece.sizes)
            state.append((kind, FlatShard(f"p{number}", shape, piece.shifted(box.offsets), view)))
    return state


def saved(layout: CutLayout, wholes: dict[tuple[str, int], Tensor]) -> tuple[dict[str, bytes], ItemCatalog]:
    """Return the data files of all ranks and their metadata."""
    files, items = {}, {}
    for rank in range(layout.tp_size * layout.dp_size):
        plan = plan_image(
            state_of(layout, wholes, rank % layout.tp_size, rank // layout.tp_size), layout.max_item_bytes
        )
        files[f"{rank}.distcp"] = image_bytes(plan)
        items[rank] = plan.items_json()
    stored = stored_by_ranks(items, lambda rank: f"{rank}.distcp")
    return files, ItemCatalog(stored.tensors, "here", lambda: "")


def wanted_boxes(state: Shards) -> list[WantedBox]:
    return [WantedBox(key_of(kind, shard.name), shard.global_shape, shard.box) for kind, shard in state]


@settings(max_examples=30)
@given(cases(), st.integers(0, 2**31))
def test_any_layout_loads_what_any_other_saved(case: Any, seed: int) -> None:
    shapes, before, after = case
    generator = torch.Generator().manual_seed(seed)
    wholes = {
        (kind, number): torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        for kind in KINDS
        for number, shape in enumerate(shapes)
    }
    files, catalog = saved(before, wholes)

    for tp_rank in range(after.tp_size):
        group = [state_of(after, wholes, tp_rank, dp_rank) for dp_rank in range(after.dp_size)]
        expected = [[shard.tensor.clone() for _, shard in state] for state in group]
        for state in group:
            for _, shard in state:
                shard.tensor.fill_(-7)
        plans = [plan_load(wanted_boxes(state), catalog) for state in group]
        lengths = [item.length for item in catalog.items]
        readers = assign_readers([[read.number for read in plan] for plan in plans], lengths)
        read_by: dict[int, Tensor] = {}
        for dp_rank, plan in enumerate(plans):
            for read in plan:
                if readers[read.number] == dp_rank:
                    assert read.number not in read_by
                    content = files[read.item.file][read.item.offset : read.item.offset + read.item.length]
                    read_by[read.number] = torch.load(io.BytesIO(content), weights_only=True)
        for state, plan in zip(group, plans, strict=True):
            for read in plan:
                for copy in read.copies:
                    state[copy.wanted][1].tensor[copy.target] = read_by[read.number][copy.source]
        for state, tensors in zip(group, expected, strict=True):
            for (_, shard), tensor in zip(state, tensors, strict=True):
                assert torch.equal(shard.tensor, tensor)
        needed = {number for plan in plans for number in (read.number for read in plan)}
        assert {number for number, reader in enumerate(readers) if reader != NO_READER} == needed


# By hand


def stored(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, StoredTensor]:
    items = tuple(
        StoredItem(offsets, sizes, f"{number % 2}.distcp", 1024 * (len(boxes) - number), 1000)
        for number, (offsets, sizes) in enumerate(boxes)
    )
    return {"model.w": StoredTensor("model.w", "float32", shape, items)}


def catalog_of(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> ItemCatalog:
    return ItemCatalog(stored(shape, *boxes), "runs/a/step-000000120", lambda: "r1-manifest.json")


def want(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[WantedBox]:
    return [WantedBox("model.w", shape, Box(offsets, sizes))]


def test_region_is_the_intersection_of_item_and_wanted_box() -> None:
    catalog = catalog_of((4, 6), ((0, 0), (4, 2)), ((0, 2), (4, 4)))
    reads = plan_load([*want((4, 6), (1, 1), (2, 3)), *want((4, 6), (3, 5), (1, 1))], catalog)

    assert [(read.number, read.key) for read in reads] == [(0, "model.w"), (1, "model.w")]
    left, right = (read.copies for read in reads)
    assert [(copy.wanted, copy.source, copy.target) for copy in left] == [
        (0, (slice(1, 3), slice(1, 2)), (slice(0, 2), slice(0, 1)))
    ]
    assert [(copy.wanted, copy.source, copy.target) for copy in right] == [
        (0, (slice(1, 3), slice(0, 2)), (slice(0, 2), slice(1, 3))),
        (1, (slice(3, 4), slice(3, 4)), (slice(0, 1), slice(0, 1))),
    ]


def test_files_are_read_forward() -> None:
    catalog = catalog_of((6,), *(((number,), (1,)) for number in range(6)))
    reads = plan_load(want((6,), (0,), (6,)), catalog)

    places = [(read.item.file, read.item.offset) for read in reads]
    assert places == sorted(places)
    assert sorted(read.number for read in reads) == list(range(6))


def test_a_region_of_no_item_is_named() -> None:
    catalog = catalog_of((8, 6), ((0, 0), (2, 6)), ((4, 0), (4, 6)), ((2, 0), (2, 5)))
    with pytest.raises(CheckpointError, match=re.escape("runs/a/step-000000120: model.w[2:4, 5:6] is in none of its")):
        plan_load(want((8, 6), (1, 0), (6, 6)), catalog)
    assert len(plan_load(want((8, 6), (1, 0), (6, 5)), catalog)) == 3


def test_a_region_of_two_items_is_refused_though_volumes_add_up() -> None:
    catalog = catalog_of((4, 4), ((0, 0), (3, 4)), ((2, 0), (1, 4)))
    message = re.escape(
        "model.w[0:3, 0:4] is in 0.distcp at 2048 and again, in part, in 1.distcp at 1024; each element"
    )
    with pytest.raises(CheckpointError, match=message):
        plan_load(want((4, 4), (0, 0), (4, 4)), catalog)


def test_missing_tensor_or_another_shape_is_named() -> None:
    catalog = catalog_of((4,), ((0,), (4,)))
    with pytest.raises(
        CheckpointError, match=r"step-000000120 holds no tensor model\.v; .* compare its r1-manifest\.json$"
    ):
        plan_load([WantedBox("model.v", (4,), Box((0,), (4,)))], catalog)
    with pytest.raises(
        CheckpointError,
        match=r"model\.w has shape \(4,\), and this configuration requires \(5,\); use .* of its r1-manifest\.json$",
    ):
        plan_load(want((5,), (0,), (4,)), catalog)


def test_a_scalar_is_one_copy() -> None:
    (read,) = plan_load(want((), (), ()), catalog_of((), ((), ())))
    assert [(copy.source, copy.target) for copy in read.copies] == [((), ())]
    with pytest.raises(CheckpointError, match=r"model\.w\[\] is in none"):
        plan_load(want((), (), ()), catalog_of(()))
    with pytest.raises(CheckpointError, match=r"model\.w\[\] is in .* and again, in part, in"):
        plan_load(want((), (), ()), catalog_of((), ((), ()), ((), ())))


@pytest.mark.slow(kept=["(10000,)", "(2, 3, 2000)"])
@pytest.mark.parametrize("shape", [(10_000,), (2_000, 10), (1, 2_000, 10), (2, 3, 2_000)], ids=str)
def test_many_boxes_of_many_items_are_not_compared_with_all(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 items of a tensor, along any dim, and 500 wanted boxes: the number of comparisons is not the product of the
    two."""
    dim = shape.index(max(shape))

    def box(first: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
        return offsets, tuple(size if d == dim else n for d, n in enumerate(shape))

    step = shape[dim] // 2_000
    catalog = catalog_of(shape, *(box(number * step, step) for number in reversed(range(2_000))))
    wanted = [one for number in range(500) for one in want(shape, *box(4 * number * step, 4 * step))]
    num_compared = 0

    def counting(one: Box, other: Box) -> Box | None:
        nonlocal num_compared
        num_compared += 1
        return shared_box(one, other)

    monkeypatch.setattr("megatrain.checkpoint.load_plan.shared_box", counting)
    monkeypatch.setattr("megatrain.checkpoint.box_cover.shared_box", counting)
    assert len(plan_load(wanted, catalog)) == 2_000
    assert num_compared == 2_000


# Readers


def test_items_are_read_by_the_ranks_with_least_to_read() -> None:
    # An item that one rank needs is read by it.
    assert assign_readers([[0], [2, 1], []], [5, 5, 5, 5]) == (0, 1, 1, NO_READER)
    assert assign_readers([[], [0, 1], [1]], [10, 10]) == (1, 2)
    # Shared items go to the rank with the fewest bytes.
    assert assign_readers([[0, 1, 2], [1, 2]], [100, 60, 40]) == (0, 1, 1)
    assert assign_readers([[0, 1], [0, 1]], [10, 10]) == (0, 1)
    assert assign_readers([[0, 1, 2], [0, 1, 2]], [10, 10, 20]) == (1, 1, 0)
    # They balance the items that only one rank can read.
    assert assign_readers([[0, 1], [0]], [100, 50]) == (1, 0)


@settings(max_examples=60)
@given(st.data())
def test_every_item_has_one_reader_and_bytes_are_even(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 1000), max_size=30))
    numbers = st.frozensets(st.integers(0, max(0, len(lengths) - 1)) if lengths else st.nothing())
    needs = data.draw(st.lists(numbers, min_size=1, max_size=6))
    readers = assign_readers(needs, lengths)

    assert len(readers) == len(lengths)
    for number, reader in enumerate(readers):
        assert number in needs[reader] if reader != NO_READER else not any(number in numbers for numbers in needs)
    # A permuted or repeated description of the same makes no difference.
    assert assign_readers([sorted(numbers, reverse=True) * 2 for numbers in needs], lengths) == readers


@settings(max_examples=40)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_items_for_all_ranks_are_read_in_equal_shares(lengths: list[int], dp_size: int) -> None:
    readers = assign_readers([range(len(lengths))] * dp_size, lengths)
    loads = [sum(n for n, reader in zip(lengths, readers, strict=True) if reader == rank) for rank in range(dp_size)]

    assert max(loads) - min(loads) <= max(lengths)
