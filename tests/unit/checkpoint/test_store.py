"""Boxes on disk: what was written comes back, stock torch reads it, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatrain.checkpoint.store import load_boxes, load_whole, save_boxes
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.sharding import Box, FlatShard, boxes_of_range

SHAPE = (5, 3, 4)


def flat_shards(whole: torch.Tensor, bounds: list[int], *, is_empty: bool = False) -> Iterator[FlatShard]:
    """Cut a tensor, flattened, at `bounds` and give each range as boxes with memory of their own."""
    for start, stop in pairwise(bounds):
        flat = whole.reshape(-1)[start:stop].clone()
        if is_empty:
            flat.fill_(-1.0)
        for position, box in boxes_of_range(whole.shape, start, stop):
            view = flat[position - start : position - start + box.numel].view(box.sizes)
            yield FlatShard("layer.weight", tuple(whole.shape), box, view)


def whole_tensor() -> torch.Tensor:
    return torch.arange(60, dtype=torch.float32).view(SHAPE)


def saved(directory: Path) -> Path:
    """Write one tensor as the ranges of three ranks, of which one belongs to somebody else."""
    save_boxes(
        directory,
        [("master", shard, True) for shard in flat_shards(whole_tensor(), [0, 17, 31, 60])],
        is_alone=True,
    )
    return directory


def test_other_ranges_are_read_back(tmp_path: Path) -> None:
    directory = saved(tmp_path / "checkpoint")
    wanted = list(flat_shards(whole_tensor(), [3, 22, 59], is_empty=True))
    load_boxes(directory, [("master", shard, True) for shard in wanted], is_alone=True)
    for shard in wanted:
        index = tuple(slice(a, a + n) for a, n in zip(shard.box.offsets, shard.box.sizes, strict=True))
        assert torch.equal(shard.tensor, whole_tensor()[index])


def test_only_owned_shards_are_written(tmp_path: Path) -> None:
    other = FlatShard("other", (2,), Box((0,), (2,)), torch.ones(2))
    shards = [("exp_avg", shard, True) for shard in flat_shards(whole_tensor(), [0, 60])]
    save_boxes(tmp_path / "c", [*shards, ("exp_avg", other, False)], is_alone=True)
    with pytest.raises(CheckpointError, match=r"holds no tensor optimizer\.exp_avg\.other"):
        load_boxes(tmp_path / "c", [("exp_avg", other, True)], is_alone=True)


def test_stock_torch_reads_the_whole_tensor(tmp_path: Path) -> None:
    dcp_to_torch_save(saved(tmp_path / "checkpoint"), tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["model.layer.weight"], whole_tensor())


def test_whole_parameters_are_rounded_to_their_dtype(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    load_whole(saved(tmp_path / "checkpoint"), {"layer.weight": parameter})
    assert torch.equal(parameter.detach(), whole_tensor().bfloat16())


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    directory = saved(tmp_path / "checkpoint")
    parameter = torch.nn.Parameter(torch.zeros(5, 3, 5))
    with pytest.raises(CheckpointError, match=r"layer\.weight has shape \(5, 3, 4\).*asks for \(5, 3, 5\)"):
        load_whole(directory, {"layer.weight": parameter})


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no readable checkpoint"):
        load_whole(tmp_path, {"layer.weight": torch.nn.Parameter(torch.zeros(SHAPE))})


def test_a_lost_file_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    directory = saved(tmp_path / "checkpoint")
    for file in directory.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match="could not read the checkpoint"):
        load_whole(directory, {"layer.weight": torch.nn.Parameter(torch.zeros(SHAPE))})


def test_a_boxed_tensor_cannot_be_computed_with() -> None:
    from megatrain.checkpoint.boxed_tensor import BoxedTensor

    boxed = BoxedTensor(list(flat_shards(whole_tensor(), [0, 60])))
    assert boxed.shape == SHAPE
    with pytest.raises(TypeError, match="saved and loaded, nothing else"):
        torch.add(boxed, 1)
