"""The origin of a snapshot in memory: progress comes from its slot, everything else from a host's plan."""

from __future__ import annotations

from typing import Any

from megatrain.arena.plans import HostPlan
from megatrain.arena.slot_layout import SlotWords
from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.attach import Attachment
from megatrain.checkpoint.continuation import Origin, TrainingProgress
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.comm.cpu_groups import CpuGroups


def memory_origin(attachment: Attachment, words: SlotWords, rank: int, cpu_groups: CpuGroups) -> Origin:
    """Return the origin of the snapshot that all ranks restore. `words`: the changing header fields of the rank's slot.

    Communication: one agreement, one gather and one broadcast, because rank 0's host may be new and lack the plan.
    Raises: CheckpointError, the same on every rank.
    """
    assert attachment.memory is not None
    origin_of_plan: dict[str, Any] | None = None
    with raised_by_all(cpu_groups, rank):
        if rank == attachment.newest_plan_rank:
            plan = HostPlan.read(attachment.arena.host_plan).manifest
            origin_of_plan = {"config": plan.config, "data": plan.data.to_dict()}
    gathered = cpu_groups.gather_json(rank, origin_of_plan)
    agreed = cpu_groups.broadcast_json(gathered and gathered[attachment.newest_plan_rank])
    progress = TrainingProgress(
        step=words.step,
        consumed_samples=words.consumed_samples,
        consumed_tokens=words.consumed_tokens,
        num_updates=words.num_updates,
        num_skipped=words.num_skipped,
    )
    return Origin(holders_text(attachment), agreed["config"], SampleStream.from_dict(agreed["data"]), progress)


def holders_text(attachment: Attachment) -> str:
    """Return which memory holds the snapshot that the ranks restore, for messages."""
    assert attachment.memory is not None
    holders = {attachment.hosts[holder] for holder in attachment.memory.holder_of}
    origin_text = f"the memory of {len(holders)} host{'' if len(holders) == 1 else 's'}"
    if attachment.missing:
        origin_text += f" ({len(attachment.missing)} of {len(attachment.hosts)} ranks from a copy at a peer)"
    return origin_text
