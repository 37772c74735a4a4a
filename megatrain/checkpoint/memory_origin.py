"""What a snapshot in memory says of the job that took it: progress from its slot, all else from a host's plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.attach import Attachment
from megatrain.checkpoint.continuation import Origin, Progress
from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena_layout import SlotWords
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.manifest import SampleStream


def memory_origin(attachment: Attachment, words: SlotWords, rank: int, host: HostGroups) -> Origin:
    """Return the origin of the snapshot that all ranks go back to; `words` are those of this rank's slot.

    Communication: one agreement, one gather and one broadcast: the host of rank 0 may be a new one.
    Raises: CheckpointError, the same on every rank.
    """
    assert attachment.memory is not None
    template: dict[str, Any] | None = None
    with raised_by_all(host, rank):
        if rank == attachment.informed_rank:
            plan = HostPlan.read(attachment.arena.host_plan).manifest
            template = {"config": plan.config, "data": asdict(plan.data)}
    gathered = host.gather_json(rank, template)
    told = host.broadcast_json(gathered and gathered[attachment.informed_rank])
    progress = Progress(
        step=words.step,
        consumed_samples=words.consumed_samples,
        consumed_tokens=words.consumed_tokens,
        num_updates=words.num_updates,
        num_skipped=words.num_skipped,
    )
    return Origin(place_in_memory(attachment), told["config"], _stream_of(told["data"]), progress)


def _stream_of(told: Mapping[str, Any]) -> SampleStream:
    skipped = tuple((first, end) for first, end in told["skipped"])
    return SampleStream(told["num_tokens"], told["seed"], skipped)


def place_in_memory(attachment: Attachment) -> str:
    """Return where the snapshot of the ranks is, for messages."""
    assert attachment.memory is not None
    holders = {attachment.hosts[holder] for holder in attachment.memory.holder_of}
    place = f"the memory of {len(holders)} host{'' if len(holders) == 1 else 's'}"
    if attachment.missing:
        place += f" ({len(attachment.missing)} of {len(attachment.hosts)} ranks by a copy at a peer)"
    return place
