"""The activity of a rank in a hang, by its black box: its position on its GPU, or in its CPU thread.

If the CPU thread is ahead of the GPU, the position is that on the GPU. The CPU thread launches work and continues. When
a kernel hangs on one GPU, the CPU threads of all ranks have entered the same exchanges and wait for their GPUs. Only
the GPUs show which of them stopped in local work, or never reached the exchange that the others are in. The flags of
each open span (RecordFlag) show whether the device has begun it, and whether the device's compute waits for it.
Source: MegaScale sec. 5.2 and fig. 8 (hangs), ADR 0061.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import GroupRecord, Progress, Record, RecordFlag
from megatrain.contracts.layout import first_axis_of
from megatrain.contracts.records.host_records import RankEvidence
from megatrain_job.failures.hang import Position, is_own_work

_MESSAGES = frozenset(operation.number for operation in Operation if operation.is_point_to_point)
_SEQUENCES = 1 << 32
"""Records count the exchanges of a group modulo this number."""


@dataclass(frozen=True, slots=True)
class HangActivity:
    """The activity of a rank in a hang: its position in each group, and what it waits for."""

    entered: Mapping[int, int]
    """Group number -> the last exchange that the CPU thread has entered, or that the device has begun."""
    awaited_group: int | None
    """Group number of the exchange that the rank waits for, or waited for last; 0: none; None: not known."""
    awaited: int
    """Sequence number of that exchange in the group."""
    in_flight: str
    """The innermost operation in progress; empty if not known."""
    is_busy: bool
    """Whether the rank is in local work, which needs no other rank."""
    is_on_device: bool = False


def activity_of(records: Sequence[Record], progress: Progress, groups: Mapping[int, GroupRecord]) -> HangActivity:
    """Return the position of a rank. records: its newest ones, in order. groups: by number."""
    in_flight = [record for record in records if record.is_span and record.is_in_flight]
    entered = {number: group.entered for number, group in groups.items() if group.stride}
    on_device = _on_device(
        [record for record in in_flight if record.flags & RecordFlag.DEVICE_CLOCK], progress, entered, groups
    )
    if on_device is not None:
        return on_device
    # the CPU thread cannot hang in a span that only the accelerator executes
    held = [record for record in in_flight if not record.flags & RecordFlag.HOST_DONE] or in_flight
    operation = held[-1].operation if held else ""
    return HangActivity(
        entered, progress.awaited_group or None, progress.awaited_place, operation, is_busy=is_own_work(operation)
    )


def reported_positions(evidence: RankEvidence) -> dict[str, Position]:
    """Return a rank's position in each group as its executor has reported it."""
    return {
        group: Position(at.entered, at.left, _reported_wait(evidence, group))
        for group, at in evidence.positions.items()
    }


def _reported_wait(evidence: RankEvidence, group: str) -> int | None:
    if not evidence.awaited_group:
        return 0 if evidence.is_on_device else None
    return evidence.awaited if evidence.awaited_group == group else 0


def _on_device(
    launched: Sequence[Record], progress: Progress, entered: Mapping[int, int], groups: Mapping[int, GroupRecord]
) -> HangActivity | None:
    """Return the position on the device; None if it has no open work, or was not read since the last launch."""
    seen_ns = progress.device_seen_ns
    if not launched or seen_ns is None or seen_ns < max(record.launch_ns for record in launched):
        return None
    exchanges = [(record, _whole_sequence(record, entered)) for record in launched if record.group in entered]
    begun = dict(entered)
    for record, sequence in reversed(exchanges):
        if not record.flags & RecordFlag.DEVICE_BEGUN:
            begun[record.group] = sequence - 1
    awaited = _awaited(exchanges, groups)
    if awaited is not None:
        record, sequence = awaited
        return HangActivity(begun, record.group, sequence, record.operation, is_busy=False, is_on_device=True)
    unknown = next((record for record in launched if record.group and record.flags & RecordFlag.DEVICE_AWAITED), None)
    if unknown is not None:  # a group whose ranks are not known: the rank is not in local work
        return HangActivity(begun, None, 0, unknown.operation, is_busy=False, is_on_device=True)
    computes = [record for record in launched if not record.group and record.flags & RecordFlag.DEVICE_BEGUN]
    operation = computes[-1].operation if computes else ""
    return HangActivity(begun, 0, 0, operation, is_busy=True, is_on_device=True)


def _awaited(exchanges: Iterable[tuple[Record, int]], groups: Mapping[int, GroupRecord]) -> tuple[Record, int] | None:
    """Return the exchange that the device's compute waits for, or None.

    If that exchange has not begun, it is queued behind another one on its stream: then the other one is returned. Each
    link has a stream of its own, so no collective is queued behind a message, and no message behind a collective.
    Groups along one axis share a stream. Records do not name the streams, and groups of replicas share one across axes
    (ADR 0060). So if no exchange along the same axis has begun, one along another axis is returned.
    """
    known = list(exchanges)
    awaited = next((exchange for exchange in known if exchange[0].flags & RecordFlag.DEVICE_AWAITED), None)
    if awaited is None or awaited[0].flags & RecordFlag.DEVICE_BEGUN:
        return awaited
    link = _link_of(awaited[0])
    axis = first_axis_of(groups[awaited[0].group].name)
    begun = [
        exchange for exchange in known if _link_of(exchange[0]) == link and exchange[0].flags & RecordFlag.DEVICE_BEGUN
    ]
    beside = (exchange for exchange in begun if first_axis_of(groups[exchange[0].group].name) == axis)
    return next(beside, next(iter(begun), awaited))


def _link_of(record: Record) -> int:
    """Return the group number of the link that a message uses; 0 for a collective."""
    return record.group if record.operation_number in _MESSAGES else 0


def _whole_sequence(record: Record, entered: Mapping[int, int]) -> int:
    """Return the whole sequence number of a record's exchange: the newest one with this remainder that was entered."""
    newest = entered[record.group]
    return newest - (newest - record.collective_sequence) % _SEQUENCES
