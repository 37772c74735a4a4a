"""Creates and updates incident records: their moments, receipts and cost. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from megatrain.contracts.records.host_records import HostStatus, RankFailure
from megatrain.contracts.records.incident import TOPIC_PREFIX, Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.notices import Receipt
from megatrain.contracts.records.rounds import Round
from megatrain_job.jobs.lost_time import MEDIAN_NOTE, effective_time_ratio
from megatrain_launcher.driver.actions import DriverAction, OpenIncident, UpdateIncident
from megatrain_launcher.driver.state import ClusterState

EXIT_CODE_NOTE = "exit_code"
"""The note with the exit code for a job that stops on request."""
REQUEST_NOTE = "request"
CHECK_NOTE = "check"
PAIRS_NOTE = "pairs"
"""The note of an incident after which all hosts run pair tests, because it has no culprit."""
HOSTS_NOTE = "num_hosts"
"""The note with the number of hosts that the round after the eviction of a straggler must have."""


def new_incident(
    now: float, state: ClusterState, kind: IncidentKind, *, round_: Round, began: float, reason: str, action: str
) -> Incident:
    """Return a new incident, with the last step and the median step time that the round's hosts report."""
    median_s = median_step_s(state, round_)
    return Incident(
        incident_id=new_id(now, state, round_.number),
        kind=kind,
        state=IncidentState.OPEN,
        round=round_.number,
        moments=Moments(began=min(began, now), detected=now, decided=now),
        reason=reason,
        action=action,
        last_step=last_step(state, round_),
        driver=state.observer,
        notes={} if median_s is None else {MEDIAN_NOTE: f"{median_s:.6g}"},
    )


def new_id(now: float, state: ClusterState, number: int) -> str:
    """Return an unused id that sorts by time."""
    while True:
        moment = datetime.fromtimestamp(now, UTC)
        found = f"{moment:%Y%m%d-%H%M%S}-{moment.microsecond // 1000:03d}-r{number}"
        if found not in state.incidents:
            return found
        now += 0.001


def history_of(state: ClusterState, before: Incident | None = None) -> tuple[Incident, ...]:
    """Return the incidents of the current launch that are older than `before` (None: all), oldest first.

    Ordered by revision, because ids contain times of different drivers' clocks.
    """
    found = (
        incident
        for incident in state.incidents.values()
        if state.is_of_this_launch(incident) and (before is None or state.opened(incident) < state.opened(before))
    )
    return tuple(sorted(found, key=lambda incident: (state.opened(incident), incident.incident_id)))


def statuses_in(state: ClusterState, round_: Round) -> tuple[HostStatus, ...]:
    """Return the statuses that hosts reported for a round, including those of hosts that are gone."""
    found = (state.status_of(part, round_.number) for part in round_.hosts)
    return tuple(status for status in found if status is not None)


def failures_of(state: ClusterState, round_: Round, earlier: Iterable[RankFailure] = ()) -> tuple[RankFailure, ...]:
    """Return the failures of a round's ranks, earliest first: the reported ones, and those of `earlier` reports."""
    failures = {failure.rank: failure for failure in earlier}
    failures.update(state.failures.get(round_.number, {}))
    known = (failure for failure in failures.values() if 0 <= failure.rank < round_.world_size)
    return tuple(sorted(known, key=lambda failure: failure.at_unix_s))


def last_step(state: ClusterState, round_: Round) -> int | None:
    """Return the last step that a round is known to have completed."""
    steps = [status.min_step for status in statuses_in(state, round_) if status.min_step is not None]
    return max(steps, default=None)


def median_step_s(state: ClusterState, round_: Round) -> float | None:
    medians = sorted(s.median_step_s for s in statuses_in(state, round_) if s.median_step_s is not None)
    return medians[len(medians) // 2] if medians else None


def advanced_incidents(now: float, state: ClusterState, round_: Round) -> tuple[Incident, ...]:
    """Return the open incidents with new moments from the progress of a live round: joined, loaded, first step."""
    found = statuses_in(state, round_)
    is_whole = len(found) == len(round_.hosts)
    changed: list[Incident] = []
    for incident in state.open_incidents():
        if incident.next_round is None or not is_whole:
            continue
        resumed = [status.resumed_step for status in found if status.resumed_step is not None]
        later = replace(
            incident,
            moments=_reached(incident.moments, found, now),
            next_round=round_.number,
            resumed_step=min(resumed, default=None),
        )
        if later.moments.first_step is not None:
            later = _closed(now, state, later)
        if later != incident:
            changed.append(later)
    return tuple(changed)


def _reached(moments: Moments, found: Sequence[HostStatus], now: float) -> Moments:
    """Return the moments with the phases of recovery that the hosts have reached.

    Recorded times are kept. No time is earlier than that of the previous phase.
    """
    joined, loaded, first_step = moments.joined, moments.loaded, moments.first_step
    least = not_before(moments.round_written or moments.detected, moments)
    if joined is None:
        joined = _within(_last(status.milestones.joined_unix_s for status in found), least, now)
    if loaded is None:
        loaded = _within(_last(status.milestones.loaded_unix_s for status in found), joined or least, now)
    if first_step is None:
        all_stepped = _last(status.milestones.first_step_unix_s for status in found)
        first_step = _within(all_stepped, loaded or joined or least, now)
    return replace(moments, joined=joined, loaded=loaded, first_step=first_step)


def not_before(now: float, moments: Moments) -> float:
    """Return `now`, or the latest recorded time if that is later, because another driver's clock may be ahead."""
    recorded = (moments.detected, moments.decided, moments.halted, moments.round_written)
    return max(now, *(moment for moment in recorded if moment is not None))


def _within(host_time: float | None, least: float, now: float) -> float | None:
    """Return a time that hosts reported; if it is not between `least` and `now`, the later of these two."""
    if host_time is None:
        return None
    return host_time if least <= host_time <= now else max(least, now)


def _last(times: Iterable[float | None]) -> float | None:
    known = list(times)
    return None if None in known else max((time for time in known if time is not None), default=None)


def _closed(now: float, state: ClusterState, incident: Incident) -> Incident:
    closed = replace(incident, state=IncidentState.RECOVERED)
    others = [other for other in history_of(state) if other.incident_id != incident.incident_id]
    first = state.rounds[min(state.rounds)].created_unix_s if state.rounds else now
    begin = state.job.created_unix_s if state.job is not None else first
    return replace(closed, effective_time_ratio=effective_time_ratio([*others, closed], begin, now))


def end_all(incidents: Iterable[Incident], *, is_recovered: bool = False) -> tuple[UpdateIncident, ...]:
    """Return updates that give open incidents their final state: recovered or stopped."""
    final = IncidentState.RECOVERED if is_recovered else IncidentState.STOPPED
    return tuple(UpdateIncident(replace(incident, state=final)) for incident in incidents)


def kept_receipts(state: ClusterState, actions: Iterable[DriverAction] = ()) -> tuple[UpdateIncident, ...]:
    """Return updates that add the receipts in receivers' records to the incidents that lack them.

    Incidents that other `actions` of the decision write are left for the next decision: one of two writes to the same
    key would be lost.
    """
    records = state.receivers.values()
    with_receipts = {topic.removeprefix(TOPIC_PREFIX) for record in records for topic in record.receipts}
    if not with_receipts:
        return ()
    busy = {action.incident.incident_id for action in actions if isinstance(action, OpenIncident | UpdateIncident)}
    known = [state.incidents[name] for name in sorted(with_receipts - busy) if name in state.incidents]
    changed = ((incident, _receipts_of(state, incident)) for incident in known)
    return tuple(
        UpdateIncident(replace(incident, receipts=receipts))
        for incident, receipts in changed
        if receipts != incident.receipts
    )


def _receipts_of(state: ClusterState, incident: Incident) -> tuple[Receipt, ...]:
    """Return all receipts of an incident, by receiver: from the receiver's record, else from the incident."""
    current = {name: record.receipts.get(incident.topic, ()) for name, record in state.receivers.items()}
    kept = (receipt for receipt in incident.receipts if not current.get(receipt.receiver))
    new = (receipt for receipts in current.values() for receipt in receipts)
    return tuple(sorted((*kept, *new), key=lambda receipt: (receipt.receiver, receipt.at_unix_s, receipt.stage)))
