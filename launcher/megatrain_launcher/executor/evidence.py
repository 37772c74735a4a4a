"""This host's evidence on a stuck round: the position of its ranks in each group, and the state of their processes.

The black boxes record, for each group, the last collective that a rank entered and left. /proc shows whether a process
is stopped, waits in the kernel, or is dead. The driver determines the culprit from the evidence of all hosts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.black_box.values import GroupRecord, Phase, Progress
from megatrain.contracts.errors import DataError
from megatrain.contracts.records.host_records import GpuErrorRecord, HangEvidence, RankEvidence, RankPosition
from megatrain.programs.processes import process_state
from megatrain_job.failures.hang_activity import activity_of
from megatrain_launcher.executor.progress import RankWatch

_NS = 1_000_000_000
_RECENT_NS = 2 * _NS
_NUM_BACK = 1024
"""The number of the newest records that are searched for open spans."""


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not exited (a zombie has)."""
    return process_state(pid) not in ("", "Z", "X")


def group_name(group: GroupRecord) -> str:
    """Return a name that distinguishes this group from all others of the job: "dp:0+4x2" has ranks 0, 2, 4 and 6."""
    return f"{group.name}:{group.first_rank}+{group.num_ranks}x{group.stride}"


def hang_evidence(
    host: str,
    session: str,
    round_number: int,
    watches: Mapping[int, RankWatch],
    at_unix_s: float,
    gpu_errors: Sequence[GpuErrorRecord] = (),
) -> HangEvidence:
    """Return the current evidence of this host's ranks. Ranks without a readable black box are listed as silent.

    `gpu_errors`: the recent errors in the kernel's log.
    """
    members: dict[str, tuple[int, ...]] = {}
    found: list[RankEvidence] = []
    silent: list[int] = []
    for rank, watch in sorted(watches.items()):
        reader = watch.reader()
        try:
            if reader is None:
                raise DataError(f"{watch.path}: no black box")
            evidence, groups = _rank_evidence(rank, watch.pid, reader)
        except DataError:
            silent.append(rank)
            continue
        members |= groups
        found.append(evidence)
    return HangEvidence(
        host, session, round_number, at_unix_s, members, tuple(found), tuple(silent), gpu_errors=tuple(gpu_errors)
    )


def _is_at_storage(progress: Progress, in_flight: str) -> bool:
    """Return whether a rank has recently shown that it waits for storage, for a snapshot or for the data of a step."""
    is_recent = time.monotonic_ns() - progress.phase_since_ns < _RECENT_NS
    return is_recent and (progress.phase is Phase.CHECKPOINT or in_flight == Operation.DATA_WAIT)


def _rank_evidence(rank: int, pid: int, reader: BlackBoxReader) -> tuple[RankEvidence, dict[str, tuple[int, ...]]]:
    progress, table = reader.progress(), reader.groups()
    groups = [group for group in table.values() if group.stride]
    newest = reader.records_since(max(0, reader.cursor() - _NUM_BACK))
    tail = [record for record in newest if record.is_span]
    newest_ns = max(
        progress.phase_since_ns,
        progress.step_started_ns or 0,
        progress.completed_ns or 0,
        *(record.start_ns + (record.duration_ns or 0) for record in tail),
    )
    activity = activity_of(tail, progress, table)
    awaited = table.get(activity.awaited_group or 0)
    evidence = RankEvidence(
        rank=rank,
        positions={group_name(group): RankPosition(activity.entered[group.number], group.left) for group in groups},
        process_state=process_state(pid),
        step=-1 if progress.current_step is None else progress.current_step,
        phase=progress.phase.name.lower().replace("_", "-"),
        newest_unix_s=reader.clock.unix_of(newest_ns) / _NS,
        in_flight=activity.in_flight,
        awaited_group=group_name(awaited) if awaited is not None and awaited.stride else "",
        awaited=activity.awaited,
        is_busy=activity.is_busy,
        is_on_device=activity.is_on_device,
        is_at_storage=_is_at_storage(progress, activity.in_flight),
    )
    return evidence, {group_name(group): (group.first_rank, group.num_ranks, group.stride) for group in groups}
