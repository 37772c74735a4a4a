"""The image of a rank's state: items at the planned places, each as torch.save would write it, copied both ways.

Copies of host memory are exact at every length and offset, compiled or not.
"""

from __future__ import annotations

import importlib.util
import io
import mmap
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.checkpoint.image import BoundImage, copy_bytes, plan_image, streamed_copy
from megatrain.checkpoint_format.item_ranges import item_ranges_problem
from megatrain.parallel.boxes import Box, boxes_of_range
from megatrain.parallel.sharding import FlatShard
from tests.helpers.images import image_bytes, image_of
from tests.helpers.require import require

SHAPE = (5, 3, 4)

PLACES = st.integers(0, 200)
GUARD = 0xA5


def flat_shards(whole: Tensor, bounds: Sequence[int], name: str = "w") -> list[FlatShard]:
    """Divide a flattened tensor at `bounds`; the boxes of all ranges are views of one flat memory."""
    flat = whole.clone().reshape(-1)
    shards = []
    for start, stop in pairwise(bounds):
        for position, box in boxes_of_range(whole.shape, start, stop):
            view = flat[position : position + box.numel].view(box.sizes)
            shards.append(FlatShard(name, tuple(whole.shape), box, view))
    return shards


def whole_tensor(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(60, dtype=torch.float32).view(SHAPE).to(dtype) + 0.5


def whole_shard(name: str, tensor: Tensor) -> FlatShard:
    return FlatShard(name, tuple(tensor.shape), Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)


def some_state() -> list[tuple[str, FlatShard]]:
    """Several dtypes and shapes, odd lengths, a scalar, a NaN with a payload and a tensor that requires grad."""
    strange = torch.tensor([0x7FC00001, 0x7F800001, 0x80000000, 1], dtype=torch.int64).to(torch.int32)
    return [
        *(("master", shard) for shard in flat_shards(whole_tensor(), [0, 17, 31, 60], "block.0.weight")),
        ("exp_avg", whole_shard("strange", strange.view(torch.float32))),
        ("exp_avg_sq", whole_shard("half", whole_tensor(torch.bfloat16))),
        ("master", whole_shard("count", torch.tensor(7, dtype=torch.int64))),
        ("master", whole_shard("leaf", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))),
    ]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_torch_loads_each_item() -> None:
    """test_envelope.py compares the bytes of an item with those of torch.save."""
    plan = plan_image(some_state())
    content = image_bytes(plan)

    assert len(plan.items) == len(some_state())
    for item in plan.items:
        loaded = torch.load(io.BytesIO(content[item.offset : item.offset + item.length]), weights_only=True)
        assert (loaded.dtype, tuple(loaded.shape), bits(loaded)) == (item.dtype, item.sizes, bits(item.tensor))


def test_items_lie_in_order_at_multiples_of_64() -> None:
    plan = plan_image(some_state())

    end = 0
    for item in plan.items:
        assert end <= item.offset < end + 64
        assert item.offset % 64 == item.data_offset % 64 == 0
        end = item.offset + item.length
    assert end <= plan.num_bytes < end + 64
    assert plan.num_bytes % 64 == 0
    assert item_ranges_problem([(item.offset, item.length) for item in plan.items], plan.num_bytes) is None


def test_keys_distinguish_weights_from_moments() -> None:
    assert {item.key for item in plan_image(some_state()).items} == {
        "model.block.0.weight", "optimizer.exp_avg.strange", "optimizer.exp_avg_sq.half", "model.count", "model.leaf",
    }  # fmt: skip


def test_image_does_not_contain_earlier_memory() -> None:
    plan = plan_image(some_state())
    dirty, other = image_of(plan, fill=0xA5)
    other.copy_out()
    assert dirty == image_bytes(plan)


def test_later_changes_do_not_reach_the_image() -> None:
    state = some_state()
    memory, image = image_of(plan_image(state))
    image.copy_out()
    before = bytes(memory)
    with torch.no_grad():
        for _, shard in state:
            shard.tensor.zero_()
    assert memory == before
    image.copy_out()
    assert memory != before


def test_the_state_comes_back_bitwise() -> None:
    state = some_state()
    _, image = image_of(plan_image(state))
    image.copy_out()
    before = [bits(shard.tensor) for _, shard in state]
    with torch.no_grad():
        for _, shard in state:
            shard.tensor.fill_(3)
    image.copy_in()

    assert [bits(shard.tensor) for _, shard in state] == before


def test_another_process_of_the_layout_reads_the_image() -> None:
    first, second = plan_image(some_state()), plan_image([(kind, emptied(shard)) for kind, shard in some_state()])
    BoundImage(second, memoryview(bytearray(image_bytes(first)))).copy_in()

    assert second.digest == first.digest
    for written, read in zip(first.items, second.items, strict=True):
        assert bits(written.tensor) == bits(read.tensor)


def emptied(shard: FlatShard) -> FlatShard:
    return FlatShard(shard.name, shard.global_shape, shard.box, torch.zeros_like(shard.tensor).detach())


def test_large_boxes_are_cut() -> None:
    whole = whole_tensor()
    for max_item_bytes in (1, 4, 16, 20, 48, 52, 96, 1000):
        plan = plan_image([("master", whole_shard("w", whole))], max_item_bytes)
        image = image_bytes(plan)

        rebuilt = torch.full(SHAPE, -1.0)
        for item in plan.items:
            assert item.tensor.nbytes <= max(4, max_item_bytes)
            assert item.tensor.is_contiguous()
            assert item.global_shape == SHAPE
            content = image[item.offset : item.offset + item.length]
            place = tuple(slice(first, first + size) for first, size in zip(item.offsets, item.sizes, strict=True))
            assert bool((rebuilt[place] == -1.0).all())
            rebuilt[place] = torch.load(io.BytesIO(content), weights_only=True)
        assert torch.equal(rebuilt, whole), max_item_bytes
        addresses = [item.tensor.data_ptr() for item in plan.items]
        assert addresses == sorted(addresses)


def test_pieces_are_as_few_and_as_even_as_can_be() -> None:
    sizes = [item.sizes for item in plan_image([("master", whole_shard("w", torch.zeros(10, 3)))], 48).items]
    assert sizes == [(4, 3), (4, 3), (2, 3)]
    sizes = [item.sizes for item in plan_image([("master", whole_shard("w", torch.zeros(9, 2)))], 64).items]
    assert sizes == [(5, 2), (4, 2)]


def test_a_cut_begins_where_its_box_begins() -> None:
    shard = FlatShard("w", (20, 9), Box((6, 4), (3, 5)), torch.zeros(3, 5))
    items = plan_image([("master", shard)], 20).items
    assert [(item.offsets, item.sizes) for item in items] == [((row, 4), (1, 5)) for row in (6, 7, 8)]


def test_copies_walk_each_memory_forward() -> None:
    shards = [("master", shard) for shard in flat_shards(whole_tensor(), [0, 17, 31, 60])]
    assert plan_image(shards[::-1]).digest == plan_image(shards).digest
    addresses = [item.tensor.data_ptr() for item in plan_image(shards[::-1]).items]
    assert addresses == sorted(addresses)


def test_image_does_not_depend_on_addresses() -> None:
    memories = sorted((torch.zeros(50_000) for _ in range(2)), key=Tensor.data_ptr)
    plans = [
        plan_image([("master", whole_shard("a", one)), ("master", whole_shard("b", other))])
        for one, other in (memories, memories[::-1])
    ]
    assert [item.key for item in plans[0].items] == ["model.a", "model.b"]
    assert plans[0].digest == plans[1].digest


def test_the_digest_is_of_the_layout_and_not_of_the_values() -> None:
    def digest(name="w", shape=(4, 6), box=((0, 0), (2, 6)), dtype=torch.float32, value=0, kind="master") -> bytes:
        tensor = torch.full(box[1], value, dtype=dtype)
        return plan_image([(kind, FlatShard(name, shape, Box(*box), tensor))]).digest

    assert digest() == digest(value=1)
    assert len(digest()) == 32
    others = [
        digest(name="v"), digest(shape=(5, 6)), digest(box=((1, 0), (2, 6))), digest(box=((0, 0), (3, 4))),
        digest(dtype=torch.int32), digest(kind="exp_avg"),
    ]  # fmt: skip
    assert len({digest(), *others}) == len(others) + 1


def test_items_are_reported_as_json() -> None:
    shards = [("exp_avg", FlatShard("w", (4, 6), Box((1, 0), (2, 6)), torch.zeros(2, 6, dtype=torch.bfloat16)))]
    plan = plan_image(shards)
    (entry,) = plan.items_json()
    assert entry == ["optimizer.exp_avg.w", [4, 6], [1, 0], [2, 6], "bfloat16", 0, plan.items[0].length]


def test_an_image_frees_its_shared_memory() -> None:
    plan = plan_image(some_state())
    header = mmap.PAGESIZE
    with mmap.mmap(-1, header + plan.num_bytes) as mapped:
        image = BoundImage(plan, memoryview(mapped)[header:])
        image.write_envelopes()
        image.copy_out()
        assert mapped[:header] == bytes(header)
        assert mapped[header : header + plan.num_bytes] == image_bytes(plan)
        with pytest.raises(BufferError):
            mapped.close()
        image.release()


def test_a_rank_that_saves_nothing_has_an_empty_image() -> None:
    plan = plan_image([])
    memory, image = image_of(plan)
    image.copy_out()
    image.copy_in()

    assert memory == b""
    assert plan.items_json() == []


def test_compiled_copy_is_available() -> None:
    copy = streamed_copy()
    require("compiler", copy is not None, "there was none when megatrain was installed")
    assert callable(copy)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    num_bytes=st.integers(0, 4096) | st.integers((256 << 10) - 70, (256 << 10) + 70),
    to=PLACES,
    source_at=PLACES,
    is_compiled=st.booleans(),
)
def test_copy_writes_just_the_bytes_of_its_range(num_bytes: int, to: int, source_at: int, is_compiled: bool) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, source_at + num_bytes, dtype=np.uint8)[source_at:]
    memory = np.full(to + num_bytes + 200, GUARD, dtype=np.uint8)
    target = memory[to : to + num_bytes]
    stream = streamed_copy()
    if is_compiled and stream is not None:
        stream(target.ctypes.data, source.ctypes.data, num_bytes)
    else:
        copy_bytes(target, source)
    assert np.array_equal(target, source)
    assert (memory[:to] == GUARD).all()
    assert (memory[to + num_bytes :] == GUARD).all()


@pytest.mark.parametrize("origin", [None, "/nonexistent/_host_copy.so", __file__])
def test_numpy_copies_without_the_compiled_copy(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    spec = None if origin is None else importlib.util.spec_from_file_location("megatrain._host_copy", origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    uncached = streamed_copy.__wrapped__
    monkeypatch.setattr("megatrain.checkpoint.image.streamed_copy", uncached)
    source = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(source)
    assert uncached() is None
    copy_bytes(target, source)
    assert np.array_equal(target, source)
