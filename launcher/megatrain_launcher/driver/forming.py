"""Forms the next round: writes it now, waits for more hosts, runs pair tests first, or ends the job.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.rounds import Cordon, JobEnd, Rollback, Round
from megatrain.formatting import count_text, names_text
from megatrain_launcher.driver.actions import CordonHost, Decision, EndJob, UpdateIncident, WriteRound
from megatrain_launcher.driver.eligibility import Eligible, eligible
from megatrain_launcher.driver.evictions import EvictionReason
from megatrain_launcher.driver.incidents import PAIRS_NOTE, end_all, not_before
from megatrain_launcher.driver.pair_checks import PairCheck, findings_text, follow_pairs
from megatrain_launcher.driver.policy import WAIT_FOR_MORE_S, Policy
from megatrain_launcher.driver.ranks import choose, parts_of
from megatrain_launcher.driver.response import EVICT
from megatrain_launcher.driver.state import ClusterState

_MAX_FENCED = 512


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
    vanished: tuple[str, ...] = (),
) -> Decision:
    """Write the next round if enough hosts are available, else wait or end the job. `since`: when waiting began.

    `fenced`: sessions of the previous round that did not confirm their stop; `left_out`: missing hosts, with the
    reasons.
    """
    found = eligible(now, state, policy, previous)
    is_first = previous is None or state.is_of_older_launch(previous)
    if is_first:
        previous, since = None, state.began
    available = {host: record for host, record in found.available.items() if record.session not in fenced}
    count = policy.best_count(len(available))
    wanted = max(policy.feasible_counts) if previous is None else policy.best_count(len(previous.hosts))
    wanted = wanted or min(policy.feasible_counts)
    if count and (count >= wanted or _may_start_with_fewer(now, state, policy, previous, available, since)):
        why = reason if count >= wanted else f"{reason}, with {count} of {count_text(wanted, 'host')}"
        tests = PairCheck()
        if policy.has_pair_checks and _are_pairs_due(previous, available, incident):
            tests = follow_pairs(now, state, policy, f"round-{state.next_number}", available.values())
            culprits = {host: text for host, text in tests.findings.culprits.items() if host in available}
            if tests.waiting or culprits:
                return _after_pairs(now, tests, culprits, incident)
        found_text = findings_text(tests.findings)
        why = f"{why}; pair tests: {found_text}" if found_text else why
        return _write_round(now, state, policy, available, count, previous, fenced, incident, why, vanished)
    missing = _missing(state, found, left_out or {}, previous, available)
    waited_s = now - since
    text = f"waiting for {wanted - len(available)} of {count_text(wanted, 'host')} since {_clock(since)}"
    text = f"{text}: {missing}" if missing else text
    if not count and waited_s > policy.join_timeout_s:
        least = min(policy.feasible_counts)
        why = (
            f"{count_text(len(available), 'host')} can take part, the job needs {least} (waited {waited_s:.0f} s, "
            f"recovery.join_timeout_s={policy.join_timeout_s:g})"
        )
        why = f"{why}: {missing}" if missing else why
        number = previous.number if previous is not None else 0
        closed = end_all(_open_with(state, incident))
        return Decision((*closed, EndJob(JobEnd(int(ExitCode.FAILURE), why, now, number))), why)
    return Decision((), text)


def _are_pairs_due(previous: Round | None, available: Mapping[str, HostRecord], incident: Incident | None) -> bool:
    """Return whether pair tests must run before the round. After a failure with a known culprit they are skipped."""
    if incident is not None:
        return PAIRS_NOTE in incident.notes
    return previous is None or not available.keys() <= {part.host for part in previous.hosts}


def _after_pairs(now: float, tests: PairCheck, culprits: Mapping[str, str], incident: Incident | None) -> Decision:
    """Continue the pair tests, or cordon the hosts at fault; the next decision forms the round without those hosts."""
    if tests.waiting:
        return Decision(tests.actions, tests.waiting)
    text = EvictionReason.PAIR_TESTS.text(findings=findings_text(tests.findings))
    incident_id = "" if incident is None else incident.incident_id
    reasons = {host: EvictionReason.PAIR_TESTS.text(findings=why) for host, why in culprits.items()}
    cordons = [CordonHost(Cordon(host, reason, "driver", now, incident_id)) for host, reason in reasons.items()]
    if incident is None:
        return Decision(tuple(cordons), text)
    named = replace(
        incident, culprit_hosts=tuple(culprits), action=EVICT, reason=text, evidence=(text, *incident.evidence)[:16]
    )
    return Decision((UpdateIncident(named), *cordons), text)


def _may_start_with_fewer(
    now: float,
    state: ClusterState,
    policy: Policy,
    previous: Round | None,
    available: Mapping[str, HostRecord],
    since: float,
) -> bool:
    """Return whether the next round may start with fewer hosts than wanted: the others have had time to register.

    After a broken round they have a long time (`shrink_after_s`) if each step would take longer without them, else a
    short time (WAIT_FOR_MORE_S).
    """
    enough = min(policy.feasible_counts) if previous is None else policy.fewest_as_fast(len(previous.hosts))
    times = sorted(state.since(state.keys.host(host), now) for host in available)
    if len(times) >= enough and now - times[enough - 1] >= WAIT_FOR_MORE_S:
        return True
    return previous is not None and now - since >= policy.shrink_after_s


def _write_round(
    now: float,
    state: ClusterState,
    policy: Policy,
    available: Mapping[str, HostRecord],
    count: int,
    previous: Round | None,
    fenced: tuple[str, ...],
    incident: Incident | None,
    reason: str,
    vanished: tuple[str, ...],
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
        rollback=_rollback_of(incident, previous),
    )
    updates = tuple(UpdateIncident(_with_round(now, incident, number)) for incident in _open_with(state, incident))
    return Decision(
        (*updates, *end_all(state.abandoned_incidents()), WriteRound(round_, vanished)),
        f"round {number} with {count_text(count, 'host')}: {reason}",
    )


def _rollback_of(incident: Incident | None, previous: Round | None) -> Rollback | None:
    """Return the rollback of the next round.

    A round without a new rollback repeats that of the previous round, which may have ended before it rolled back.
    """
    if incident is not None and incident.rollback is not None:
        return incident.rollback
    return None if previous is None else previous.rollback


def _with_round(now: float, incident: Incident, number: int) -> Incident:
    """Return an incident with `number` as the round of its recovery, without the moments of an earlier such round."""
    written = not_before(now, incident.moments)
    moments = replace(incident.moments, round_written=written, joined=None, loaded=None, first_step=None)
    return replace(incident, next_round=number, moments=moments)


def _open_with(state: ClusterState, incident: Incident | None) -> tuple[Incident, ...]:
    """Return the open incidents, with `incident` in place of its recorded state."""
    open_ = {incident.incident_id: incident for incident in state.open_incidents()}
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
    """Return a text that names the missing hosts, each with the reason."""
    reasons: dict[str, str] = dict(found.refused)
    for part in previous.hosts if previous is not None else ():
        if part.host not in state.hosts:
            reasons[part.host] = f"gone since {_clock(state.gone_since(part))}"
        elif part.host in left_out and part.host not in available:
            reasons[part.host] = left_out[part.host]
    return names_text([f"{host} ({reasons[host]})" for host in sorted(reasons, key=natural_order)])


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S} UTC"
