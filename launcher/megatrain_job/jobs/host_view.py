"""The activity of each host of a job, in one word, and the reason if it does not train. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.host_records import HostPhase, HostRecord, HostStatus, Stall
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Cordon, RoundHost
from megatrain.formatting import ranks_text, seconds_text
from megatrain_job.failures.culprit import first_of
from megatrain_job.jobs.incident_phrases import rank_end_text
from megatrain_job.jobs.snapshot import JobSnapshot


class HostState(StrEnum):
    """A host's activity, beyond the phases of its executor."""

    SPARE = "spare"
    """Fit, and in no round, while others train."""
    WAITING = "waiting"
    """Fit, and there is no round yet, or its round is over."""
    UNFIT = "unfit"
    CORDONED = "cordoned"
    LOST = "lost"
    """In the newest round, but gone: its lease has ended, or the driver has found it dead before that."""
    RETURNED = "returned"
    """Its executor was restarted; only the next round can include it."""
    SILENT = "silent"
    """In the running round and registered, but without a status yet."""
    GONE = "gone"
    """Not registered: a cordoned host, or one of the last round of a job that does not run."""
    DRIVES = "drives"
    """A host without workers, on which `megatrain driver` runs."""


_NEEDS_HELP = (HostState.LOST, HostState.UNFIT, HostState.RETURNED)


@dataclass(frozen=True, slots=True)
class HostView:
    """One host. part: its part in the newest round, even if that round is over."""

    host: str
    state: str
    part: RoundHost | None = None
    record: HostRecord | None = None
    status: HostStatus | None = None
    cordon: Cordon | None = None
    is_driver: bool = False
    problem: str = ""
    """The problem that the host reports about itself or its workers."""
    remark: str = ""
    """The problem, and the reason why the host does not train."""

    @property
    def ranks(self) -> range:
        return range(0) if self.part is None else self.part.ranks

    @property
    def is_lost(self) -> bool:
        return self.state in (HostState.LOST, HostState.RETURNED)

    @property
    def is_unfit(self) -> bool:
        return self.state == HostState.UNFIT

    @property
    def is_in_order(self) -> bool:
        return not self.remark and self.state not in _NEEDS_HELP


def dead_ranks(part: RoundHost, status: HostStatus) -> tuple[int, ...]:
    """Return the ranks of a host that have no process according to the bitmap in its status."""
    try:
        alive = int(status.alive_ranks or "0", 16)
    except ValueError:
        return ()
    return tuple(part.first_rank + local for local in range(part.num_workers) if not alive >> local & 1)


def host_views(snapshot: JobSnapshot) -> tuple[HostView, ...]:
    """Return every host that is registered, in the newest round, or cordoned: those of the round first, by rank."""
    newest = snapshot.newest_round
    parts = {part.host: part for part in newest.hosts} if newest is not None else {}
    is_over = snapshot.newest_halt is not None or snapshot.end is not None
    dead = _found_dead(snapshot)
    others = (set(snapshot.hosts) | set(snapshot.cordons)) - set(parts)
    names = [*parts, *sorted(others, key=natural_order)]
    return tuple(_view(snapshot, name, parts.get(name), dead, is_over=is_over) for name in names)


def _found_dead(snapshot: JobSnapshot) -> dict[tuple[str, str], str]:
    """Return why the driver found hosts dead, by host and session. Their leases may still exist for some seconds."""
    lost = [
        incident
        for incident in snapshot.incidents
        if incident.state is IncidentState.OPEN and incident.kind is IncidentKind.HOST_LOST
    ]
    return {
        (part.host, part.session): incident.reason
        for incident in lost
        if incident.round in snapshot.rounds
        for part in snapshot.rounds[incident.round].hosts
        if part.host in incident.culprit_hosts
    }


def _view(
    snapshot: JobSnapshot,
    host: str,
    part: RoundHost | None,
    dead: Mapping[tuple[str, str], str],
    *,
    is_over: bool,
) -> HostView:
    record, cordon = snapshot.hosts.get(host), snapshot.cordons.get(host)
    end = "" if record is None else dead.get((host, record.session), "")
    if end:
        record = None
    status = None if record is None else snapshot.status_of(host, record.session)
    problem = _problem(part, status)
    return HostView(
        host=host,
        state=_state(snapshot, part, record, status, is_cordoned=cordon is not None, is_over=is_over),
        part=part,
        record=record,
        status=status,
        cordon=cordon,
        is_driver=bool(snapshot.driver) and snapshot.driver == host,
        problem=problem,
        remark=_remark(record, cordon, problem, end),
    )


def _state(
    snapshot: JobSnapshot,
    part: RoundHost | None,
    record: HostRecord | None,
    status: HostStatus | None,
    *,
    is_cordoned: bool,
    is_over: bool,
) -> str:
    if record is None:
        return HostState.LOST if part is not None and snapshot.hosts and snapshot.end is None else HostState.GONE
    if part is not None and part.session != record.session:
        return HostState.RETURNED
    if part is not None and not is_over:
        return HostState.SILENT if status is None else str(status.phase)
    if record.num_workers == 0:
        return HostState.DRIVES
    if is_cordoned:
        return HostState.CORDONED
    if not record.is_fit:
        return HostState.UNFIT
    if status is not None and status.phase is not HostPhase.PARKED:
        return str(status.phase)
    has_live_round = snapshot.newest_round is not None and not is_over
    return HostState.SPARE if has_live_round else HostState.WAITING


def _problem(part: RoundHost | None, status: HostStatus | None) -> str:
    if status is None:
        return ""
    found: list[str] = []
    first = first_of(status.failures)
    if first is not None:
        found.append(rank_end_text(first))
    elif part is not None and status.phase is HostPhase.RUNNING and (dead := dead_ranks(part, status)):
        found.append(f"{ranks_text(dead)} {'has' if len(dead) == 1 else 'have'} no process")
    if status.stall is not None:
        found.append(stall_text(status.stall))
    found += [text for text in (status.problem, "" if status.failures else status.last_error) if text]
    return "; ".join(found)


def _remark(record: HostRecord | None, cordon: Cordon | None, problem: str, end: str) -> str:
    remarks = [end]
    if record is not None and not record.is_fit:
        remarks.append(record.unfit_reason or "its checks failed")
    if cordon is not None:
        remarks.append(f"cordoned by {cordon.by}: {cordon.reason}")
    return "; ".join(text for text in (*remarks, problem) if text)


def stall_text(stall: Stall) -> str:
    """Return "rank 3 made no progress for 12 s after step 210, in step (limit 5.0 s)"."""
    who, where = ranks_text(stall.ranks) or "its ranks", stall.phase or "a step"
    silent, limit = seconds_text(stall.silent_s), seconds_text(stall.limit_s)
    return f"{who} made no progress for {silent} after step {stall.step:,}, in {where} (limit {limit})"
