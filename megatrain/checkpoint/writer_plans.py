"""The plans that the writer of a host needs to store the snapshots of a round: one for each rank, one for the host."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import megatrain
from megatrain.arena.directory import Arena
from megatrain.arena.plans import HostPlan, ManifestTemplate, RankPlan
from megatrain.checkpoint.arena_slots import SnapshotPlan
from megatrain.checkpoint.attach import Attachment
from megatrain.checkpoint.metadata_file import publish_description
from megatrain.checkpoint.round_claim import RoundClaim
from megatrain.checkpoint.save_policy import checkpoint_bytes
from megatrain.checkpoint_format.data_file import data_file_bytes
from megatrain.checkpoint_format.manifest import CheckpointMesh, CheckpointVersions
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.config.serialize import config_hash


def publish_rank_plan(arena: Arena, plan: SnapshotPlan, mesh: Mesh, round_number: int, *, tokenizer: str) -> int | None:
    """Write this rank's plan, and on rank 0 the description of all items.

    Communication: one gather. Returns the bytes of a checkpoint of the job, on rank 0 only.
    """
    file = plan.file
    items = tuple((item.offset, item.length) for item in file.items)
    RankPlan(rank=mesh.rank, image_bytes=file.num_bytes, plan_digest=plan.digest, items=items).write(
        arena.rank_plan(mesh.rank)
    )
    gathered = mesh.cpu_groups.gather_json(mesh.rank, [file.items_json(), data_file_bytes(file.num_bytes, items)])
    if gathered is None:
        return None
    items_by_rank = {owner: described for owner, (described, _) in enumerate(gathered)}
    described_bytes = publish_description(arena, round_number, items_by_rank)
    return checkpoint_bytes((size for _, size in gathered), described_bytes, tokenizer)


def host_plan(
    config: Config,
    mesh: Mesh,
    attachment: Attachment,
    claim: RoundClaim,
    checkpoints: str,
    branch: str,
    stream: SampleStream,
    *,
    keep_arena_s: float,
) -> HostPlan:
    """Return the plan of this rank's host. checkpoints: the directory or URL of the branches."""
    hosts = attachment.hosts
    names = list(dict.fromkeys(hosts))
    host = hosts[mesh.rank]
    return HostPlan(
        checkpoints=checkpoints,
        job=config.job.name,
        branch=branch,
        round=claim.number,
        host_index=names.index(host),
        num_hosts=len(names),
        ranks=attachment.ranks_of_host(mesh.rank),
        is_coordinator=host == hosts[0],
        num_slots=config.checkpoint.slots,
        keep_last=config.checkpoint.num_kept,
        keep_every=config.checkpoint.keep_every,
        keep_arena_s=keep_arena_s,
        # shorter than the ranks' wait for a free slot: if one host cannot store, a checkpoint fails, and not the round
        commit_timeout_s=config.runtime.checkpoint_timeout_s / 2,
        manifest=ManifestTemplate(
            config=config.to_dict(),
            config_hash=config_hash(config),
            mesh=CheckpointMesh(mesh.layout, config.parallel.num_chunks),
            versions=CheckpointVersions(megatrain.__version__, torch.__version__, platform.python_version()),
            has_optimizer=True,
            data=stream,
        ),
        tokenizer=str(Path(config.data.tokenizer).absolute()) if config.data.tokenizer else "",
        claim=claim.content,
        began_at_step=claim.began_at_step,
        is_exclusive=claim.is_exclusive,
    )
