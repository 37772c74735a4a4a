"""Who may take part in the next round, and whether it is written now or waits for more hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.host_records import HostRecord
from megatrain.contracts.incident import Incident
from megatrain.contracts.rounds import JobEnd, Round
from megatrain_launcher.driver.actions import Decision, EndJob, UpdateIncident, WriteRound
from megatrain_launcher.driver.incidents import CHECK_NOTE, ended
from megatrain_launcher.driver.policy import CHECK_TIMEOUT_S, LAST_CALL_S, Policy
from megatrain_launcher.driver.ranks import choose, parts_of
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.texts import count_text, natural_order

_MAX_FENCED = 512


@dataclass(frozen=True, slots=True)
class Eligible:
    """Hosts that may take part, and why the other registered ones may not."""

    available: Mapping[str, HostRecord]
    refused: Mapping[str, str]


def eligible(now: float, state: ClusterState, policy: Policy, previous: Round | None) -> Eligible:
    """Sort the registered hosts. `previous`: the newest round, whose members are the caller's to judge."""
    fenced = {session for one in state.rounds.values() for session in one.fenced}
    members = {part.session for part in previous.hosts} if previous is not None else set()
    newest = {part.session: number for number in sorted(state.rounds) for part in state.rounds[number].hosts}
    available: dict[str, HostRecord] = {}
    refused: dict[str, str] = {}
    for host in sorted(state.hosts, key=natural_order):
        record = state.hosts[host]
        reason = _refusal(now, state, policy, record)
        if not reason and record.session in fenced:
            reason = "it did not say that its workers of an older round are gone; its executor must start anew"
        named = 0 if record.session in members else newest.get(record.session, 0)
        if not reason and named and not _is_idle(state, record, named):
            reason = "it may still have workers of an older round"
        if reason:
            refused[host] = reason
        else:
            available[host] = record
    return Eligible(available, refused)


def _refusal(now: float, state: ClusterState, policy: Policy, record: HostRecord) -> str:
    if not record.is_fit:
        return f"it is unfit: {record.unfit_reason or 'its checks failed'}"
    if record.host in state.cordons:
        return f"it is cordoned: {state.cordons[record.host].reason}"
    if record.num_workers != policy.num_workers:
        return f"it has {record.num_workers} workers, the job {policy.num_workers} a host"
    if state.job is not None and record.config_hash != state.job.config_hash:
        return "its configuration differs from the job's"
    return _check_pending(now, state, record)


def _check_pending(now: float, state: ClusterState, record: HostRecord) -> str:
    """Return why a host that must pass its checks may not take part yet."""
    for incident_id in sorted(state.incidents, reverse=True):
        incident = state.incidents[incident_id]
        if record.host not in incident.notes.get(CHECK_NOTE, "").split(","):
            continue
        report = state.checks.get((incident_id, record.host))
        if report is not None and report.failed:
            return f"it failed its check: {report.failed[0].name}: {report.failed[0].detail}"
        is_over = incident.next_round is not None or report is not None
        asked_s = now - (incident.moments.halted or now)
        return "" if is_over or asked_s > CHECK_TIMEOUT_S else f"its check after incident {incident_id} is under way"
    return ""


def _is_idle(state: ClusterState, record: HostRecord, named: int) -> bool:
    """Say whether a host has said that it has no workers since a round that named it, which later ones did not."""
    status = state.statuses.get(record.host)
    part = state.rounds[named].part_of(record.host, record.session)
    if status is None or part is None or status.round < named:
        return False
    return state.has_stopped(part, status.round)


def form(
    now: float,
    state: ClusterState,
    policy: Policy,
    *,
    previous: Round | None,
    fenced: tuple[str, ...] = (),
    left_out: Mapping[str, str] | None = None,
    incident: Incident | None = None,
    since: float,
    reason: str,
) -> Decision:
    """Write the next round if enough hosts are there, else wait or end the job. `since`: when waiting began.

    `fenced`: sessions of the round before that did not stop in order; `left_out`: hosts and why they are missing.
    """
    found = eligible(now, state, policy, previous)
    is_first = previous is None or state.is_of_older_launch(previous)
    if is_first:
        previous, since = None, state.began
    available = {host: record for host, record in found.available.items() if record.session not in fenced}
    count = policy.best_count(len(available))
    wanted = max(policy.feasible_counts) if previous is None else policy.best_count(len(previous.hosts))
    wanted = wanted or min(policy.feasible_counts)
    if count and (count >= wanted or _is_last_call_over(now, state, policy, previous, available, since)):
        why = reason if count >= wanted else f"{reason}, with {count} of {wanted} hosts"
        return _write(now, state, policy, available, count, previous, fenced, incident, why)
    missing = _missing(state, found, left_out or {}, previous, available)
    waited_s = now - since
    text = f"waiting for {wanted - len(available)} of {wanted} hosts since {_clock(since)}"
    text = f"{text}: {missing}" if missing else text
    if not count and waited_s > policy.join_timeout_s:
        least = min(policy.feasible_counts)
        why = (
            f"{len(available)} hosts can take part, {least} must (waited {waited_s:.0f} s, recovery.join_timeout_s="
            f"{policy.join_timeout_s:g})"
        )
        why = f"{why}: {missing}" if missing else why
        number = previous.number if previous is not None else 0
        closed = tuple(UpdateIncident(ended(one, is_recovered=False)) for one in _open_with(state, incident))
        return Decision((*closed, EndJob(JobEnd(int(ExitCode.FAILURE), why, now, number))), why)
    return Decision((), text)


def _is_last_call_over(
    now: float,
    state: ClusterState,
    policy: Policy,
    previous: Round | None,
    available: Mapping[str, HostRecord],
    since: float,
) -> bool:
    """Say whether to go on with fewer hosts than wanted."""
    if previous is not None:
        return now - since >= policy.shrink_after_s
    times = sorted(state.since(state.keys.host(host), now) for host in available)
    return now - times[min(policy.feasible_counts) - 1] >= LAST_CALL_S


def _write(
    now: float,
    state: ClusterState,
    policy: Policy,
    available: Mapping[str, HostRecord],
    count: int,
    previous: Round | None,
    fenced: tuple[str, ...],
    incident: Incident | None,
    reason: str,
) -> Decision:
    records = choose(available, previous, count)
    number = state.next_number
    before = state.round
    all_fenced = tuple(dict.fromkeys((*(before.fenced if before is not None else ()), *fenced)))[-_MAX_FENCED:]
    round_ = Round(
        number=number,
        world_size=count * policy.num_workers,
        hosts=parts_of(records, policy.num_workers),
        store_address=records[0].address,
        store_port=records[0].store_port,
        reason=reason,
        driver=state.observer,
        created_unix_s=now,
        incident="" if incident is None else incident.incident_id,
        fenced=all_fenced,
    )
    updates = tuple(
        UpdateIncident(replace(one, next_round=number, moments=replace(one.moments, round_written=now)))
        for one in _open_with(state, incident)
    )
    return Decision((*updates, WriteRound(round_)), f"round {number} with {count_text(count, 'host')}: {reason}")


def _open_with(state: ClusterState, incident: Incident | None) -> tuple[Incident, ...]:
    """Return the open incidents, the one at hand as it is after this decision."""
    open_ = {one.incident_id: one for one in state.open_incidents()}
    if incident is not None:
        open_[incident.incident_id] = incident
    return tuple(open_[key] for key in sorted(open_))


def _missing(
    state: ClusterState,
    found: Eligible,
    left_out: Mapping[str, str],
    previous: Round | None,
    available: Mapping[str, HostRecord],
) -> str:
    """Name the hosts that are not there, since when, and why."""
    told: dict[str, str] = dict(found.refused)
    for part in previous.hosts if previous is not None else ():
        if part.host not in state.hosts:
            told[part.host] = f"gone since {_clock(state.gone_since(part))}"
        elif part.host in left_out and part.host not in available:
            told[part.host] = left_out[part.host]
    names = sorted(told, key=natural_order)
    shown = [f"{host} ({told[host]})" for host in names[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S} UTC"
