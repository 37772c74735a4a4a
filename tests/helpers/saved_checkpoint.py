"""Whole small checkpoints: one of a single tensor, and one to which every rank of a job writes a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint.arena_slots import plan_snapshot
from megatrain.checkpoint.gathered_items import stored_by_ranks
from megatrain.checkpoint.image import MAX_ITEM_BYTES, ImagePlan, key_of, plan_image
from megatrain.checkpoint.metadata_file import describing_files
from megatrain.checkpoint.offline_writer import write_checkpoint
from megatrain.checkpoint_format.checkpoint_files import write_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.commit import write_commit
from megatrain.checkpoint_format.data_file import (
    ItemHasher,
    content_digest,
    data_file_name,
    encode_trailer,
    trailer_digest,
)
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import CheckpointMesh, FileEntry, Manifest
from megatrain.cli import main
from megatrain.comm import dry_mesh
from megatrain.config.config import Config
from megatrain.config.serialize import config_hash
from megatrain.hf.tensor_map import parameter_shapes
from megatrain.parallel.boxes import Box
from megatrain.parallel.sharding import FlatShard
from megatrain.training.rank_model import build_rank_model
from tests.helpers.checkpoint_tree import make_manifest
from tests.helpers.images import image_bytes

KINDS = ("master", "exp_avg", "exp_avg_sq")


def put_whole(branch: Location, step: int, tensor: Tensor | None = None, **changes: Any) -> Path:
    """Write a committed checkpoint of one tensor, "model.word", that verifies."""
    whole = torch.full((3, 4), float(step)) if tensor is None else tensor
    shard = FlatShard("word", tuple(whole.shape), Box((0,) * whole.dim(), tuple(whole.shape)), whole)
    place = branch / step_directory_name(step)
    manifest = make_manifest(branch=branch.name, step=step, has_optimizer=False, **changes)
    write_checkpoint(
        place,
        manifest,
        [(0, plan_image([("master", shard)]))],
        lambda item: item.tensor,
        lambda number: data_file_name(manifest.round, number),
        {},
    )
    return Path(str(place))


def whole_state(config: Config) -> dict[str, Tensor]:
    """Return all state of a model by key, every element random."""
    generator = torch.Generator().manual_seed(3)
    return {
        key_of(kind, name): torch.randn(shape, generator=generator)
        for name, shape in parameter_shapes(config.model).items()
        for kind in (*KINDS, *(("ema",) if config.optimizer.ema_decay else ()))
    }


def write_as_job(
    directory: Path,
    config: Config,
    state: dict[str, Tensor],
    step: int = 7,
    beside: Mapping[str, bytes] | None = None,
    max_item_bytes: int = MAX_ITEM_BYTES,
) -> Manifest:
    """Write the checkpoint that the ranks of a job write together: each fills its image from memory.

    beside: files without tensors.
    """
    layout = config.layout(None)
    files: dict[str, bytes] = dict(beside or {})
    entries = {name: FileEntry(len(content), content_digest(content)) for name, content in files.items()}
    items = {}
    for rank in range(layout.world_size):
        with dry_mesh(layout, rank, has_wrap_links=config.parallel.num_chunks > 1, holders=config.holders) as mesh:
            shards = build_rank_model(config, mesh, mesh.recorder, torch.device("cpu")).saved_shards()
        for shard in shards:
            region = zip(shard.shard.box.offsets, shard.shard.box.sizes, strict=True)
            whole = state[key_of(shard.kind, shard.shard.name)]
            shard.shard.tensor.copy_(whole[tuple(slice(at, at + size) for at, size in region)])
        plan = plan_snapshot(shards, max_item_bytes).file
        name = data_file_name(2, rank)
        files[name], entries[name] = _data_file(plan)
        items[rank] = plan.items_json()
    described = describing_files(stored_by_ranks(items, lambda rank: data_file_name(2, rank)))
    entries |= {name: FileEntry(len(content), content_digest(content)) for name, content in described.items()}
    files |= described
    mesh_sizes = CheckpointMesh(layout, config.parallel.num_chunks)
    values = {"step": step, "files": entries, "mesh": mesh_sizes, "config": config.to_dict(),
              "config_hash": config_hash(config)}  # fmt: skip
    manifest = make_manifest(**values)
    place = LocalLocation(directory)
    for name, content in files.items():
        (place / name).write(content)
    write_manifest(place, manifest)
    write_commit(place, manifest)
    return manifest


def _data_file(plan: ImagePlan) -> tuple[bytes, FileEntry]:
    content = image_bytes(plan)
    hasher = ItemHasher([(item.offset, item.length) for item in plan.items], plan.num_bytes, "image")
    hasher.update(content)
    trailer = encode_trailer(hasher.finish())
    return content + trailer, FileEntry(plan.num_bytes + len(trailer), trailer_digest(trailer))


def with_layout(config: Config, *, tp: int = 1, pp: int = 1, dp: int = 1, chunks: int = 1) -> Config:
    """Return a configuration in another layout, with a schedule that fits it."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    parallel = dataclasses.replace(
        config.parallel, tp_size=tp, pp_size=pp, dp_size=dp, num_chunks=chunks, schedule=schedule
    )
    return dataclasses.replace(config, parallel=parallel)


Ckpt = Callable[..., Any]


def ckpt_runner(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """Return a function that runs `megatrain ckpt` with some arguments, and returns its output: text, or JSON."""

    def ckpt(*arguments: object, code: int = 0) -> Any:
        capsys.readouterr()
        found = main(["ckpt", *map(str, arguments)])
        captured = capsys.readouterr()
        assert found == code, captured.err
        if code and not captured.out:
            return captured.err
        if "--json" not in arguments:
            return captured.out
        document = json.loads(captured.out)
        assert document["schema_version"] == 1
        return document

    return ckpt
