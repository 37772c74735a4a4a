"""The files of several ranks are one checkpoint to stock torch, and to our own reader of its index."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint.gathered_items import stored_by_ranks
from megatrain.checkpoint.image import ItemsJson, plan_image
from megatrain.checkpoint.metadata_file import describing_files, metadata_bytes
from megatrain.checkpoint_format.data_file import content_digest
from megatrain.checkpoint_format.index_file import CheckpointIndex
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensor, StoredTensors
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box, boxes_of_range
from megatrain.parallel.sharding import FlatShard
from tests.helpers.images import image_bytes
from tests.helpers.require import lazy_module

dcp = lazy_module("torch.distributed.checkpoint")
format_utils = lazy_module("torch.distributed.checkpoint.format_utils")


def file_name(rank: int) -> str:
    return f"r000002-rank-{rank:05d}.distcp"


def ranges(kind: str, name: str, whole: Tensor, bounds: list[int]) -> list[list[tuple[str, FlatShard]]]:
    """Return, for each rank, its flat range of a whole tensor as boxes."""
    flat = whole.reshape(-1)
    return [
        [
            (kind, FlatShard(name, tuple(whole.shape), box, flat[first : first + box.numel].view(box.sizes)))
            for first, box in boxes_of_range(whole.shape, start, stop)
        ]
        for start, stop in pairwise(bounds)
    ]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(math.prod(shape), dtype=torch.float32).view(shape) * 1.1 - 5).to(dtype)


WHOLE = {
    "model.block.0.weight": numbers(5, 3, 4),
    "optimizer.exp_avg.block.0.weight": numbers(5, 3, 4) + 100,
    "model.bias": numbers(17, dtype=torch.float64),
    "model.norm": numbers(6, dtype=torch.bfloat16),
    "model.scale": torch.tensor(2.5),
}


def state_of_ranks() -> list[list[tuple[str, FlatShard]]]:
    """Four ranks; the last two hold a tensor's two halves by columns, and an item that no other rank has."""
    weight = ranges("master", "block.0.weight", WHOLE["model.block.0.weight"], [0, 7, 31, 59, 60])
    moment = WHOLE["optimizer.exp_avg.block.0.weight"]
    halves = [
        FlatShard("block.0.weight", (5, 3, 4), Box((0, 0, first), (5, 3, 2)), moment[..., first : first + 2].clone())
        for first in (0, 2)
    ]
    return [
        weight[0] + ranges("master", "bias", WHOLE["model.bias"], [0, 17])[0],
        weight[1],
        weight[2] + ranges("master", "norm", WHOLE["model.norm"], [0, 6])[0] + [("exp_avg", halves[0])],
        weight[3] + ranges("master", "scale", WHOLE["model.scale"], [0, 1])[0] + [("exp_avg", halves[1])],
    ]


def described(items: Mapping[int, ItemsJson]) -> dict[str, bytes]:
    return describing_files(stored_by_ranks(items, file_name))


def written(directory: Path, max_item_bytes: int = 64 << 20) -> Path:
    items = {}
    for rank, state in enumerate(state_of_ranks()):
        plan = plan_image(state, max_item_bytes)
        (directory / file_name(rank)).write_bytes(image_bytes(plan) + b"whatever follows the items")
        items[rank] = plan.items_json()
    for name, content in described(items).items():
        (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("max_item_bytes", [24, 64 << 20])
def test_stock_torch_makes_one_file_of_it(tmp_path: Path, max_item_bytes: int) -> None:
    format_utils.dcp_to_torch_save(written(tmp_path, max_item_bytes), tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)

    assert set(loaded) == set(WHOLE)
    for key, whole in WHOLE.items():
        assert loaded[key].dtype == whole.dtype
        assert torch.equal(loaded[key], whole)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stock_torch_loads_it(tmp_path: Path) -> None:
    target = {key: torch.zeros_like(whole) for key, whole in WHOLE.items()}
    dcp.load(target, checkpoint_id=written(tmp_path), no_dist=True)

    assert all(torch.equal(target[key], whole) for key, whole in WHOLE.items())


def test_our_reader_finds_the_same(tmp_path: Path) -> None:
    directory = written(tmp_path, 24)
    index = CheckpointIndex.decode((directory / "index.json").read_bytes(), "index.json")
    metadata = (directory / ".metadata").read_bytes()
    assert index.metadata_digest == content_digest(metadata)
    stored = index.stored

    assert {key: (tensor.shape, tensor.dtype) for key, tensor in stored.tensors.items()} == {
        key: (tuple(whole.shape), str(whole.dtype).removeprefix("torch.")) for key, whole in WHOLE.items()
    }
    for tensor in stored.tensors.values():
        assert [item.offsets for item in tensor.items] == sorted(item.offsets for item in tensor.items)
    for rank, state in enumerate(state_of_ranks()):
        for item in plan_image(state, 24).items:
            (found,) = (one for one in stored.tensors[item.key].items if one.offsets == item.offsets)
            assert (found.sizes, found.file) == (item.sizes, file_name(rank))
            assert (found.offset, found.length) == (item.offset, item.length)


def test_torch_unpickles_what_it_would_have_written_itself() -> None:
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors = {
        f"model.{number}.weight-\u00e9": StoredTensor(
            f"model.{number}.weight-\u00e9", dtype, shape, (StoredItem((0,) * len(shape), shape, file, offset, length),)
        )
        for number, (dtype, shape, file, offset, length) in enumerate([
            ("float32", (), "r000001-rank-00000.distcp", 0, 1),
            ("bfloat16", (255,), "r000001-rank-00000.distcp", 255, 256),
            ("float64", (256, 3), "r000001-rank-00001.distcp", 2**31 - 1, 2**31),
            ("int64", (1, 2, 70_000), "r000001-rank-00001.distcp", 2**40, 2**62),
            ("bool", (1, 2, 3, 4), "x" * 300, 65_536, 1),
            *(("float16", (number,), "r000001-rank-00002.distcp", number, 2) for number in range(300)),
        ])
    }  # fmt: skip
    found = pickle.loads(metadata_bytes(StoredTensors(tensors)))

    assert found == Metadata(
        state_dict_metadata={
            key: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, tensor.dtype)),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)) for item in tensor.items],
            )
            for key, tensor in tensors.items()
        },
        planner_data={key: (key,) for key in tensors},
        storage_data={
            MetadataIndex(key, item.offsets, number): _StorageInfo(item.file, item.offset, item.length)
            for key, tensor in tensors.items()
            for number, item in enumerate(tensor.items)
        },
        version=CURRENT_DCP_VERSION,
    )
    assert [index.index for index in found.storage_data] == [0] * len(tensors)


def items_of_ranks() -> dict[int, list[list[object]]]:
    return {rank: plan_image(state).items_json() for rank, state in enumerate(state_of_ranks())}


def test_the_metadata_does_not_depend_on_the_order_of_ranks() -> None:
    items = items_of_ranks()
    assert described(dict(reversed(items.items()))) == described(items)


def problem_of(items: dict[int, list[list[object]]]) -> str:
    with pytest.raises(CheckpointError) as refused:
        described(items)
    return str(refused.value)


def test_boxes_of_two_ranks_that_overlap_are_refused() -> None:
    items = items_of_ranks()
    items[2].append(copy.deepcopy(items[0][-1]))
    assert "model.bias[0:17] of rank 0 and [0:17] of rank 2 overlap" in problem_of(items)

    items = items_of_ranks()
    items[1].append(next(copy.deepcopy(item) for item in items[3] if item[0] == "model.scale"))
    assert "model.scale[] of rank 1 and [] of rank 3 overlap" in problem_of(items)

    items = items_of_ranks()
    half = next(item for item in items[3] if item[0] == "optimizer.exp_avg.block.0.weight")
    half[2] = [0, 0, 1]
    assert "[0:5, 0:3, 0:2] of rank 2 and [0:5, 0:3, 1:3] of rank 3 overlap" in problem_of(items)


def test_element_that_no_rank_saves_is_refused() -> None:
    items = items_of_ranks()
    items[1] = [item for item in items[1] if item[2] != [0, 1, 3]]
    assert "model.block.0.weight[0:1, 1:2, 3:4] is saved by no rank" in problem_of(items)


@pytest.mark.parametrize(("field", "value"), [(1, [18]), (4, "float32")])
def test_ranks_of_different_models_are_refused(field: int, value: object) -> None:
    items = items_of_ranks()
    other = copy.deepcopy(items[0][-1])
    other[2], other[field] = [9], value
    items[1].append(other)
    pattern = r"model.bias is float64 of shape \(17,\) on rank 0 but .* on rank 1; all ranks must run the same"
    assert re.search(pattern, problem_of(items))


def test_an_unknown_dtype_is_refused() -> None:
    items = items_of_ranks()
    items[3] = [[*item[:4], "nn", *item[5:]] if item[0] == "model.scale" else item for item in items[3]]
    assert "model.scale has dtype 'nn', which torch does not have" in problem_of(items)
