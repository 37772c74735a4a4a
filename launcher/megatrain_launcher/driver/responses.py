"""The driver's response to a failure, chosen from the facts that are known once all workers are gone.

Pure functions: no I/O and no clock. Exit codes take precedence over the verdict on the log of the earliest failed rank
that is not a victim. The limits on restarts are applied last and can turn a restart into a stop of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.formatting import count_text, names_text, ranks_text
from megatrain_job.failures.culprit import is_victim, root_of
from megatrain_job.failures.verdict import LABELS, FailureAction, Label, label_row
from megatrain_job.jobs.incident_phrases import rank_and_end
from megatrain_job.jobs.restart_budget import HOUR_S, is_automatic, step_of
from megatrain_launcher.driver.evictions import EvictionReason
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.response import (
    EVICT,
    REQUEUE,
    RESTART,
    ROLLBACK,
    STOP,
    Facts,
    Response,
    exit_code_of,
)
from megatrain_launcher.driver.response_limits import (
    evict_if_recurring,
    failure_counts,
    incident_ids,
    incidents_since,
    limit_restarts,
    names_with_counts,
)

_FATAL = {
    ExitCode.CONFIG: "the configuration or the layout is wrong",
    ExitCode.DATA: "an input file is missing or damaged",
    ExitCode.CHECKPOINT: "there is no checkpoint that can be loaded",
    ExitCode.NO_PERMISSION: "access was refused",
}
"""Exit codes after which a restart cannot help, with the reason."""
_LABEL_OF_CODE = {
    ExitCode.NON_FINITE: Label.NUMERICS,
    ExitCode.SAVE_FAILED: Label.STORAGE,
    # other hosts may reach the storage
    ExitCode.UNREACHABLE: Label.NETWORK,
}
_ONE_RETRY = (FailureAction.STOP_USER, FailureAction.RETRY_THEN_STOP, FailureAction.ROLLBACK)


def respond(facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    """Return the response to a broken round. `history`: the incidents before this one, oldest first."""
    response = _by_cause(facts, history, policy, now)
    if response.action in (RESTART, EVICT, ROLLBACK):
        return limit_restarts(evict_if_recurring(response, facts, history, policy, now), facts, history, policy, now)
    return response


def _by_cause(facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    if facts.kind is IncidentKind.HANG:
        return _for_hang(facts, history, policy, now)
    root = root_of(facts.failures)
    if root is not None and not (facts.lost and label_row(root.label).is_sign_of_loss):
        return _for_root(root, facts, history, policy, now)
    if facts.lost:
        names = tuple(sorted(facts.lost))
        reason = EvictionReason.HOST_LOST.text(**_subject(names), evidence="; ".join(facts.lost.values()))
        return Response(EVICT, reason, culprit_hosts=names, kind=IncidentKind.HOST_LOST)
    if facts.suspects:
        return _for_network(facts.suspects, (), facts, history, policy, now)
    if facts.failures:
        first = min(facts.failures, key=lambda failure: (failure.at_unix_s, failure.rank))
        reason = f"{_end_of(first, facts)} because of another rank; no log names the culprit"
        return Response(RESTART, reason, label=first.label, needs_pair_tests=True)
    return Response(
        RESTART, facts.stop_reason or f"workers of round {facts.round} were stopped, but no reason is recorded"
    )


def _for_hang(facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    """Restart without the culprits whose GPUs are broken, or that hang too often.

    Other hosts on which a GPU reported an error must pass their checks first.
    """
    hosts, ranks = facts.suspects, facts.suspect_ranks
    checked = tuple(sorted(facts.gpu_faults)) if policy.has_health_checks else ()
    named = Response(
        RESTART, "", culprit_hosts=hosts, culprit_ranks=ranks, label="hang", kind=IncidentKind.HANG, checked=checked
    )  # fmt: skip
    if not hosts:
        return replace(named, reason="a hang without a culprit", needs_pair_tests=True)
    who = names_text(hosts)
    if ranks:
        who = f"{ranks_text(ranks)} on {who}"
    causes = (facts.gpu_faults[host].text for host in hosts if host in facts.gpu_faults)
    signs = "; ".join(sign for sign in (facts.sign, *causes) if sign)
    reason = f"{who} held up all others{f': {signs}' if signs else ''}"
    broken = tuple(host for host in hosts if _is_broken(host, facts))
    times = failure_counts(
        hosts, [incident for incident in incidents_since(history, now - HOUR_S) if incident.kind is IncidentKind.HANG]
    )
    often = tuple(host for host in hosts if host not in broken and times[host] >= policy.hangs_per_hour)
    if broken:
        reason = EvictionReason.BROKEN_IN_A_HANG.text(hang=reason, **_subject(broken))
    if often:
        reason = EvictionReason.HANGS.text(hang=reason, times=names_with_counts(often, times))
    if broken or often:
        cordoned = (*broken, *often)
        left = tuple(host for host in checked if host not in cordoned)
        return replace(named, action=EVICT, reason=reason, cordoned=cordoned, checked=left)
    return replace(named, reason=reason)


def _is_broken(host: str, facts: Facts) -> bool:
    """Return whether a host's kernel log, or the log of a worker that failed by itself, shows broken hardware."""
    fault = facts.gpu_faults.get(host)
    if fault is not None and fault.action is FailureAction.EVICT_HOST:
        return True
    return any(
        facts.host_of.get(failure.rank) == host and _label_and_action(failure)[1] == FailureAction.EVICT_HOST
        for failure in facts.failures
        if not is_victim(failure)
    )


def _for_root(root: RankFailure, facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    label, action = _label_and_action(root)
    host = facts.host_of.get(root.rank, "")
    hosts = (host,) if host else ()
    text = _end_of(root, facts)
    named = Response(RESTART, text, label=label, culprit_hosts=hosts, culprit_ranks=(root.rank,))
    if root.exit_code in _FATAL:
        reason = f"{text}: {_FATAL[ExitCode(root.exit_code)]}, and a restart does not help"
        return replace(named, action=STOP, reason=reason, exit_code=root.exit_code)
    if action == FailureAction.EVICT_HOST and hosts:
        reason = EvictionReason.BROKEN_HOST.text(failure=text, host=host)
        return replace(named, action=EVICT, reason=reason, cordoned=hosts)
    if action == FailureAction.TOLERATE_THEN_EVICT and hosts:
        return _for_network(hosts, (root.rank,), facts, history, policy, now, text)
    if action == FailureAction.RESTART_THEN_CHECK and hosts and policy.has_health_checks:
        return replace(named, reason=f"{text}; {host} must pass its checks", checked=hosts)
    if action == FailureAction.REQUEUE:
        reason = f"{text}: the scheduler reclaims this allocation"
        return replace(named, action=REQUEUE, reason=reason, exit_code=int(ExitCode.SAVED_AND_STOPPED))
    if action in _ONE_RETRY and _is_again(label, facts, history):
        reason = f"{text}, as before at the same step: a restart did not help"
        return replace(named, action=STOP, reason=reason, exit_code=exit_code_of(root))
    if root.exit_code == ExitCode.NON_FINITE and facts.last_step:
        return _for_non_finite(named, facts.last_step, history, policy, now)
    return named


def _for_non_finite(
    named: Response, last_step: int, history: Sequence[Incident], policy: Policy, now: float
) -> Response:
    """Roll back to before the consecutive skipped (non-finite) steps, and leave out their batches.

    If the cause is the model's state and not the batches, the failure recurs at the same step, and the job stops.
    """
    if policy.max_rollbacks == 0:
        return named
    recent = rollbacks_since(history, now - HOUR_S)
    if len(recent) >= policy.max_rollbacks:
        reason = (
            f"{named.reason}; the job has already rolled back {count_text(len(recent), 'time')} within an hour, "
            f"diagnostics.max_rollbacks={policy.max_rollbacks} ({incident_ids(recent)})"
        )
        return replace(named, action=STOP, reason=reason, exit_code=int(ExitCode.NON_FINITE))
    first = max(0, last_step - policy.max_skipped_steps)
    reason = f"{named.reason}; back to step {first} or before, without the batches of steps {first}-{last_step - 1}"
    return replace(named, action=ROLLBACK, reason=reason, rollback=(first, first, last_step - 1))


def rollbacks_since(incidents: Iterable[Incident], moment: float) -> list[Incident]:
    """Return the incidents since `moment` for which the job rolled back."""
    return incidents_since([incident for incident in incidents if incident.rollback is not None], moment)


def _for_network(
    hosts: tuple[str, ...],
    ranks: tuple[int, ...],
    facts: Facts,
    history: Sequence[Incident],
    policy: Policy,
    now: float,
    text: str = "",
) -> Response:
    """Restart after a host's first network failures; evict it at `network_failures` of them within the window."""
    text = text or f"victims lost the connection to {names_text(hosts)}"
    named = Response(RESTART, text, label=Label.NETWORK, culprit_hosts=hosts, culprit_ranks=ranks)
    recent = incidents_since(history, now - policy.network_window_s)
    times = failure_counts(hosts, [incident for incident in recent if incident.label == named.label])
    cordoned = tuple(host for host in hosts if times[host] >= policy.network_failures)
    if cordoned:
        names = names_with_counts(cordoned, times)
        reason = EvictionReason.NETWORK_FAILURES.text(failure=text, times=names, window_s=policy.network_window_s)
        return replace(named, action=EVICT, reason=reason, culprit_hosts=cordoned, cordoned=cordoned)
    return named


def _subject(hosts: Sequence[str]) -> dict[str, str]:
    """Return the facts for a sentence about these hosts."""
    return {"hosts": names_text(hosts), "are": "is" if len(hosts) == 1 else "are"}


def _label_and_action(failure: RankFailure) -> tuple[str, str]:
    """Return label and action. An exit code in _LABEL_OF_CODE takes precedence over the log."""
    by_code = _LABEL_OF_CODE.get(ExitCode(failure.exit_code)) if failure.exit_code in set(ExitCode) else None
    if by_code is not None:
        return by_code, LABELS[by_code].action
    return failure.label, failure.action or label_row(failure.label).action


def _is_again(label: str, facts: Facts, history: Sequence[Incident]) -> bool:
    """Return whether the previous failure had the same label and no step beyond its last step was completed since."""
    before = next((incident for incident in reversed(history) if is_automatic(incident)), None)
    if before is None or before.label != label:
        return False
    return step_of(facts.last_step) <= step_of(before.last_step)


def _end_of(failure: RankFailure, facts: Facts) -> str:
    text = rank_and_end(failure, facts.host_of.get(failure.rank))
    return f"{text}: {failure.line.strip()}" if failure.line else text
