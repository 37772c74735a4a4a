"""Writes a checkpoint as a job of another layout would write it.

A job reads a checkpoint of any layout, so it can continue without a conversion. A conversion helps if many ranks read
from slow storage, or if a tool needs a single file. To find out what each rank of the new layout holds, the trainer's
own code builds the rank model on the meta device, without communication. The files of many ranks are written at the
same time, part by part, so that a stored item that several files need is read once (parts.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from megatrain.checkpoint.arena_slots import plan_snapshot
from megatrain.checkpoint.checked_files import checked_content
from megatrain.checkpoint.image import MAX_ITEM_BYTES, ImagePlan
from megatrain.checkpoint.offline_writer import NewCheckpoint, new_checkpoint
from megatrain.checkpoint.parameter_reader import ParameterReader, bytes_of_kept_items
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import INDEX_NAME, METADATA_NAME, name_without_round
from megatrain.checkpoint_format.data_file import data_file_name, is_data_file
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import CheckpointMesh, Manifest
from megatrain.comm import dry_mesh
from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.serialize import config_hash
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.layout import Layout
from megatrain.conversion.parts import WriteOrder, parts_of
from megatrain.conversion.software import current_versions, job_config
from megatrain.schedule import nearest_schedule
from megatrain.training.rank_model import build_rank_model

_NUM_FILES_AT_ONCE = 64
"""Limited, because the client of an object store holds 16 MiB of memory for each file."""


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """The written manifest, and the bytes of items that were read for it."""

    manifest: Manifest
    bytes_read: int


def reshard(
    source: Location,
    output: Location,
    layout: Layout,
    num_chunks: int,
    layers_per_chunk: tuple[int, ...] = (),
    *,
    max_item_bytes: int = MAX_ITEM_BYTES,
) -> ReshardReport:
    """Write the committed checkpoint `source` to `output` in the given layout, and commit it.

    layers_per_chunk: the new parallel.layers_per_chunk; empty means the even split, even if the source has another one.
    max_item_bytes: the largest size of one item; memory holds several items at a time. Jobs use the default.
    Raises: ConfigError when a job cannot run the model in this layout; CheckpointError naming the file.
    """
    manifest = read_manifest(source)
    config = _with_layout(job_config(manifest, source), layout, num_chunks, layers_per_chunk)
    reader = ParameterReader(source, manifest, bytes_of_kept_items(max_item_bytes))
    written = replace(
        manifest,
        written_unix_s=time.time(),
        mesh=CheckpointMesh(layout, num_chunks),
        config=config.to_dict(),
        config_hash=config_hash(config),
        versions=current_versions(),
        files={},
    )
    with new_checkpoint(
        output, written, lambda rank: data_file_name(manifest.round, rank), _small_files(source, manifest, reader)
    ) as target:
        planned = planned_images(config, layout, max_item_bytes, has_optimizer=manifest.has_optimizer)
        for images in _windows(planned):
            _write_images(target, images, reader, max_item_bytes)
    return ReshardReport(target.manifest, reader.bytes_read)


def planned_images(
    config: Config, layout: Layout, max_item_bytes: int, *, has_optimizer: bool
) -> Iterator[tuple[int, ImagePlan]]:
    """Yield each rank of a job and the image of its data file. The tensors in the plans are on the meta device."""
    for rank in range(layout.world_size):
        with dry_mesh(layout, rank, has_wrap_links=config.parallel.num_chunks > 1, holders=config.holders) as mesh:
            shards = build_rank_model(config, mesh, mesh.recorder, torch.device("meta")).saved_shards()
        saved = [shard for shard in shards if has_optimizer or shard.kind == "master"]
        yield rank, plan_snapshot(saved, max_item_bytes).file


def _windows(images: Iterable[tuple[int, ImagePlan]]) -> Iterator[list[tuple[int, ImagePlan]]]:
    remaining = iter(images)
    while window := list(islice(remaining, _NUM_FILES_AT_ONCE)):
        yield window


def _write_images(
    target: NewCheckpoint, images: Iterable[tuple[int, ImagePlan]], reader: ParameterReader, max_item_bytes: int
) -> None:
    """Write the data files of some ranks, all at the same time."""
    files = [target.create(rank, plan) for rank, plan in images]
    parts = [[part for item in file.plan.items for part in parts_of(item, reader, max_item_bytes)] for file in files]
    num_missing = [len(of_file) for of_file in parts]
    write_order = WriteOrder([[part.needs for part in of_file] for of_file in parts])
    for file in (file for file, num_parts in zip(files, num_missing, strict=True) if not num_parts):
        file.close()  # the rank owns no values
    while (number := write_order.take(reader.is_kept)) is not None:
        part = parts[number][-num_missing[number]]
        files[number].append(reader.read_box(part.item.key, part.item.global_shape, part.box))
        num_missing[number] -= 1
        if not num_missing[number]:
            files[number].close()


def _with_layout(config: Config, layout: Layout, num_chunks: int, layers_per_chunk: tuple[int, ...]) -> Config:
    sizes: dict[str, Any] = layout.sizes
    schedule = nearest_schedule(config.parallel.schedule, layout.pp_size, num_chunks)
    parallel = replace(
        config.parallel,
        **sizes,
        num_chunks=num_chunks,
        layers_per_chunk=layers_per_chunk,
        counts_embedding_as_layer=False,
        counts_head_as_layer=False,
        schedule=schedule,
    )
    changed = replace(config, parallel=parallel)
    problems = check(changed, {}, layout.world_size)
    if problems:
        raise ConfigError(problems)
    return changed


def _small_files(source: Location, manifest: Manifest, reader: ParameterReader) -> dict[str, bytes]:
    """Return the files besides those of the tensors, for example tokenizer.json."""
    of_tensors = {*reader.files, *(manifest.name_of(name) for name in (METADATA_NAME, INDEX_NAME))}
    # reader.files lacks data files without tensors, which belong to ranks that own no values
    return {
        name_without_round(name): checked_content(source, manifest, name)
        for name, entry in manifest.files.items()
        if name not in of_tensors and not is_data_file(entry)
    }
