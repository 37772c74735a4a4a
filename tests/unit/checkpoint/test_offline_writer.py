"""A checkpoint that one process writes is whole, stock torch reads it, and nothing of others is overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatrain.checkpoint.data_file import data_file_name, read_trailer, verify_checkpoint
from megatrain.checkpoint.image import ImageItem, plan_image
from megatrain.checkpoint.offline_writer import write_checkpoint, write_image
from megatrain.contracts.checkpoint_files import WRITING_NAME, is_committed
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import LocalLocation
from megatrain.contracts.manifest import Manifest
from megatrain.parallel.sharding import Box, FlatShard
from tests.helpers.checkpoint_tree import make_manifest

WHOLE = {
    "model.word": torch.arange(60.0).view(5, 12),
    "model.norm": torch.full((7,), 2.5, dtype=torch.bfloat16),
    "model.scale": torch.tensor(4.0, dtype=torch.float64),
}


def shard(key: str) -> tuple[str, FlatShard]:
    """Return a whole tensor without memory, as a plan is made of."""
    whole = WHOLE[key].to("meta")
    return "master", FlatShard(key.removeprefix("model."), whole.shape, Box((0,) * whole.dim(), whole.shape), whole)


def part(item: ImageItem) -> Tensor:
    ranges = zip(item.offsets, item.sizes, strict=True)
    return WHOLE[item.key][tuple(slice(at, at + size) for at, size in ranges)]


def write(place: LocalLocation, max_item_bytes: int = 50) -> Manifest:
    plans = [plan_image([shard("model.word"), shard("model.norm")], max_item_bytes), plan_image([shard("model.scale")])]
    manifest = make_manifest(has_optimizer=False, files={})
    return write_checkpoint(
        place, manifest, enumerate([*plans, plan_image([])]), part, lambda number: data_file_name(2, number),
        {"tokenizer.json": b"{}"},
    )  # fmt: skip


@pytest.mark.parametrize("max_item_bytes", [8, 50, 1000])
def test_stock_torch_reads_what_was_planned_without_memory(tmp_path: Path, max_item_bytes: int) -> None:
    manifest = write(LocalLocation(tmp_path / "saved"), max_item_bytes)

    assert verify_checkpoint(LocalLocation(tmp_path / "saved")) == []
    assert set(manifest.files) == {
        ".metadata", "tokenizer.json", *(f"r000002-rank-{number:05d}.distcp" for number in range(3)),
    }  # fmt: skip
    assert set(os.listdir(tmp_path / "saved")) == {*manifest.files, "manifest.json", "COMMIT"}
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert loaded.keys() == WHOLE.keys()
    for key, whole in WHOLE.items():
        assert loaded[key].dtype == whole.dtype
        assert torch.equal(loaded[key], whole)


def test_a_plan_without_memory_is_that_of_the_state_itself() -> None:
    base = torch.zeros(100)
    views = [base[40:70].view(5, 6), base[:30].view(30), torch.zeros(4)]
    shards = [
        ("master", FlatShard(f"x{number}", view.shape, Box((0,) * view.dim(), view.shape), view))
        for number, view in enumerate(views)
    ]
    hollow_base = torch.zeros(100, device="meta")
    hollow = [hollow_base[40:70].view(5, 6), hollow_base[:30].view(30), torch.zeros(4, device="meta")]
    copies = [
        (kind, FlatShard(one.name, one.global_shape, one.box, view))
        for (kind, one), view in zip(shards, hollow, strict=True)
    ]
    assert [item.key for item in plan_image(shards).items] == ["model.x1", "model.x0", "model.x2"]
    assert plan_image(shards).digest == plan_image(copies).digest


def test_a_complete_or_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    write(LocalLocation(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="is a complete checkpoint already and is not overwritten"):
        write(LocalLocation(tmp_path / "saved"))
    (tmp_path / "saved/COMMIT").unlink()
    with pytest.raises(CheckpointError, match="which no conversion wrote"):
        write(LocalLocation(tmp_path / "saved"))
    assert (tmp_path / "saved/manifest.json").exists()


def test_what_breaks_off_is_unfinished_and_can_be_done_again(tmp_path: Path) -> None:
    place = LocalLocation(tmp_path / "saved")
    number = len(WHOLE)

    def failing(item: ImageItem) -> Tensor:
        nonlocal number
        number -= 1
        if not number:
            raise CheckpointError("the source is gone")
        return part(item)

    plan = plan_image([shard("model.word")], 50)
    with pytest.raises(CheckpointError, match="the source is gone"):
        write_checkpoint(place, make_manifest(files={}), [(0, plan)], failing, lambda number: "x", {})
    assert os.listdir(tmp_path / "saved") == [WRITING_NAME]
    assert not is_committed(place)

    write(place)

    assert verify_checkpoint(place) == []


def test_the_last_bytes_of_an_image_are_padding(tmp_path: Path) -> None:
    plan = plan_image([shard("model.norm")])
    place = LocalLocation(tmp_path / "file")
    entry = write_image(place, plan, part)
    trailer = read_trailer(place, entry.size, entry.digest)
    assert trailer.image_bytes == plan.num_bytes
    assert [(item.offset, item.length) for item in trailer.items] == [(one.offset, one.length) for one in plan.items]
