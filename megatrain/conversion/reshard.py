"""Write a checkpoint as a job of another layout would write it.

A job reads a checkpoint of any layout, so this is never needed to go on. It helps where the readers are many and the
storage is slow, or where a tool asks for one file. What each rank of the new layout holds is not computed here: the
rank is built by the trainer's own code, on the meta device in a world that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.assembly import build_replica
from megatrain.checkpoint.arena_slots import plan_snapshot
from megatrain.checkpoint.data_file import content_digest, data_file_name, is_data_file
from megatrain.checkpoint.image import ImageItem, ImagePlan
from megatrain.checkpoint.metadata_reader import METADATA_NAME, load_metadata
from megatrain.checkpoint.offline_writer import write_checkpoint
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.comm import dry_mesh
from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.serialize import config_hash
from megatrain.contracts.checkpoint_files import read_manifest
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.layout import Layout
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import CheckpointMesh, Manifest
from megatrain.conversion.software import current_versions, job_config
from megatrain.parallel.sharding import Box


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What was written, and the bytes that were read for it: items that several ranks need are read for each."""

    manifest: Manifest
    bytes_read: int


def reshard(source: Location, output: Location, layout: Layout, num_chunks: int) -> ReshardReport:
    """Write the committed checkpoint `source` to `output` in the layout given, and commit it.

    Raises: ConfigError when no job of this layout could run the model; CheckpointError naming the file.
    """
    manifest = read_manifest(source)
    config = _with_layout(job_config(manifest, source), layout, num_chunks)
    reader = ParameterReader(source, manifest)

    def data_of(item: ImageItem) -> Tensor:
        return reader.read_box(item.key, item.global_shape, Box(item.offsets, item.sizes))

    written = write_checkpoint(
        output,
        replace(
            manifest,
            written_unix_s=time.time(),
            mesh=CheckpointMesh(layout.tp_size, layout.pp_size, layout.dp_size, num_chunks),
            config=config.to_dict(),
            config_hash=config_hash(config),
            versions=current_versions(),
            files={},
        ),
        planned_images(config, layout, has_optimizer=manifest.has_optimizer),
        data_of,
        lambda rank: data_file_name(manifest.incarnation, rank),
        _small_files(source, manifest),
    )
    return ReshardReport(written, reader.bytes_read)


def planned_images(config: Config, layout: Layout, *, has_optimizer: bool) -> Iterator[tuple[int, ImagePlan]]:
    """Yield each rank of a job and the image of the file that it writes. The plans' tensors have no memory."""
    for rank in range(layout.world_size):
        with dry_mesh(layout, rank, has_wrap_links=config.parallel.num_chunks > 1) as mesh:
            shards = build_replica(config, mesh, mesh.recorder, torch.device("meta")).saved_shards()
        yield rank, plan_snapshot([one for one in shards if has_optimizer or one.kind == "master"]).file


def _with_layout(config: Config, layout: Layout, num_chunks: int) -> Config:
    schedule = config.parallel.schedule
    if (schedule == "interleaved") != (num_chunks > 1):
        schedule = "interleaved" if num_chunks > 1 else "1f1b"
    parallel = replace(
        config.parallel,
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        dp_size=layout.dp_size,
        num_chunks=num_chunks,
        schedule=schedule,
    )
    changed = replace(config, parallel=parallel)
    problems = check(changed, {}, layout.world_size)
    if problems:
        raise ConfigError(problems)
    return changed


def _small_files(source: Location, manifest: Manifest) -> dict[str, bytes]:
    """Return the files beside the tensors, as tokenizer.json."""
    of_tensors = {METADATA_NAME, *load_metadata(source).ranges_by_file()}
    # a data file may hold no tensor: that of a rank which owns nothing
    small = {
        name: (source / name).read()
        for name, entry in manifest.files.items()
        if name not in of_tensors and not is_data_file(entry)
    }
    for name, content in small.items():
        if content_digest(content) != manifest.files[name].digest:
            raise CheckpointError(f"{source / name}: is not the file that the manifest vouches for; it is damaged")
    return small
