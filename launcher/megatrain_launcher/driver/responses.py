"""What a failure means: restart, evict or stop, from what is known when the broken round's workers are gone. Pure.

Exit codes speak first, then the verdict on the log of the rank that failed first without being a victim. The limits on
restarts come last and can turn every answer into a stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.host_records import RankFailure
from megatrain.contracts.incident import Incident, IncidentKind
from megatrain.failures.culprit import SIGNS_OF_LOSS, root_of
from megatrain.failures.verdict import ACTIONS, Action, Label
from megatrain.jobs.restart_budget import HOUR_S, is_automatic, restart_budget, step_of
from megatrain.jobs.words import rank_and_end
from megatrain_launcher.driver.policy import Policy

_FATAL = {
    ExitCode.CONFIG: "the configuration or the layout is wrong",
    ExitCode.DATA: "an input file is missing or damaged",
    ExitCode.CHECKPOINT: "there is no checkpoint that can be loaded",
    ExitCode.NO_PERMISSION: "access was refused",
}
"""Restarting does not help."""
_LABEL_OF_CODE = {ExitCode.NON_FINITE: Label.NUMERICS, ExitCode.SAVE_FAILED: Label.STORAGE}
_ONE_RETRY = (Action.STOP_USER, Action.RETRY_THEN_STOP, Action.ROLLBACK)
_BLAMELESS = (
    Label.COLLECTIVE_TIMEOUT, Label.CUDA_OOM, Label.HOST_OOM, Label.USER_CODE, Label.DATA, Label.STORAGE,
    Label.NUMERICS, Label.PREEMPTION, Label.DRIVER_SOFTWARE,
)  # fmt: skip
"""Failures that would have come on any other host, too."""
RESTART, EVICT, STOP, REQUEUE, HOLD = "restart", "evict", "stop", "requeue", "hold"
ROLLBACK = "rollback"
"""A restart from before what went wrong, without the batches that did it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a broken round."""

    kind: IncidentKind
    round: int
    failures: tuple[RankFailure, ...]
    host_of: Mapping[int, str]
    """By rank."""
    lost: Mapping[str, str]
    """Hosts of the round that are gone, with the evidence."""
    accused: tuple[str, ...]
    """Hosts that victims lost the connection to, or that a hang's evidence points at."""
    accused_ranks: tuple[int, ...] = ()
    sign: str = ""
    """The strongest evidence of a hang, in a sentence."""
    last_step: int | None = None
    told: str = ""
    """Why a host stopped its workers by itself, in its words."""
    fit: frozenset[str] = frozenset()
    """Hosts that may take part in the next round, as far as nothing of this answer keeps them out."""


@dataclass(frozen=True, slots=True)
class Response:
    """What to do. `exit_code` is the job's where `action` is stop or requeue."""

    action: str
    reason: str
    label: str = ""
    culprit_hosts: tuple[str, ...] = ()
    culprit_ranks: tuple[int, ...] = ()
    cordoned: tuple[str, ...] = ()
    """Those of the culprits that may not come back by themselves."""
    is_checked: bool = False
    """The culprits must pass their health checks before they take part again."""
    is_paired: bool = False
    """There is no culprit: pair tests of all hosts come before the next round."""
    exit_code: int = 0
    kind: IncidentKind = IncidentKind.FAILURE
    rollback: tuple[int, int, int] | None = None
    """The step to go back to, and the first and the last one whose batches are left out."""

    @property
    def is_cordoned(self) -> bool:
        return bool(self.cordoned)


def respond(facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    """Return what to do about a broken round. `history`: the incidents before this one, the oldest first."""
    response = _by_cause(facts, history, policy, now)
    if response.action in (RESTART, EVICT, ROLLBACK):
        return _brake(_again_and_again(response, facts, history, policy, now), facts, history, policy, now)
    return response


def _by_cause(facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    if facts.kind is IncidentKind.HANG:
        return _for_hang(facts, history, policy, now)
    root = root_of(facts.failures)
    if root is not None and not (facts.lost and root.label in SIGNS_OF_LOSS):
        return _for_root(root, facts, history, policy, now)
    if facts.lost:
        names = tuple(sorted(facts.lost))
        reason = f"{_names(names)} {'is' if len(names) == 1 else 'are'} gone: {'; '.join(facts.lost.values())}"
        return Response(EVICT, reason, culprit_hosts=names, kind=IncidentKind.HOST_LOST)
    if facts.accused:
        return _for_network(facts.accused, (), facts, history, policy, now)
    if facts.failures:
        first = min(facts.failures, key=lambda failure: (failure.at_unix_s, failure.rank))
        reason = f"{_end_of(first, facts)}, a victim; whose, no log says"
        return Response(RESTART, reason, label=first.label, is_paired=True)
    return Response(RESTART, facts.told or f"workers of round {facts.round} were stopped, and no reason is recorded")


def _for_hang(facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    hosts, ranks = facts.accused, facts.accused_ranks
    named = Response(
        RESTART, "", culprit_hosts=hosts, culprit_ranks=ranks, label="hang", kind=IncidentKind.HANG
    )  # fmt: skip
    if not hosts:
        return replace(named, reason="a hang without a culprit", is_paired=True)
    who = f"{_ranks(ranks)} on {_names(hosts)}" if ranks else _names(hosts)
    reason = f"{who} held up all others{f': {facts.sign}' if facts.sign else ''}"
    times = _times(hosts, [one for one in _since(history, now - HOUR_S) if one.kind is IncidentKind.HANG])
    cordoned = tuple(host for host in hosts if times[host] >= policy.hangs_per_hour)
    if cordoned:
        reason = f"{reason}; {_names_of_times(cordoned, times)} within an hour"
        return replace(named, action=EVICT, reason=reason, cordoned=cordoned)
    return replace(named, reason=reason)


def _for_root(root: RankFailure, facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    label, action = _verdict_on(root)
    host = facts.host_of.get(root.rank, "")
    hosts = (host,) if host else ()
    text = _end_of(root, facts)
    named = Response(RESTART, text, label=label, culprit_hosts=hosts, culprit_ranks=(root.rank,))
    if root.exit_code in _FATAL:
        reason = f"{text}: {_FATAL[ExitCode(root.exit_code)]}, and a restart does not help"
        return replace(named, action=STOP, reason=reason, exit_code=root.exit_code)
    if action == Action.EVICT_HOST and hosts:
        return replace(named, action=EVICT, reason=f"{text}: {host} is broken", cordoned=hosts)
    if action == Action.TOLERATE_THEN_EVICT and hosts:
        return _for_network(hosts, (root.rank,), facts, history, policy, now, text)
    if action == Action.RESTART_THEN_CHECK and hosts and policy.has_health_checks:
        return replace(named, reason=f"{text}; {host} must pass its checks", is_checked=True)
    if action == Action.REQUEUE:
        reason = f"{text}: this allocation is being taken away"
        return replace(named, action=REQUEUE, reason=reason, exit_code=int(ExitCode.SAVED_AND_STOPPED))
    if action in _ONE_RETRY and _is_again(label, facts, history):
        reason = f"{text}, as before at the same step: a restart did not help"
        return replace(named, action=STOP, reason=reason, exit_code=_exit_code_of(root))
    if root.exit_code == ExitCode.NON_FINITE and facts.last_step:
        return _for_non_finite(named, facts.last_step, history, policy, now)
    return named


def _for_non_finite(
    named: Response, last_step: int, history: Sequence[Incident], policy: Policy, now: float
) -> Response:
    """Go back to before the steps in a row that changed nothing, and leave out their batches.

    Should the state be at fault and not these, the same comes again at the same step, and the job stops.
    """
    if policy.max_rollbacks == 0:
        return named
    recent = rollbacks_since(history, now - HOUR_S)
    if len(recent) >= policy.max_rollbacks:
        reason = (
            f"{named.reason}; the job went back {len(recent)} times within an hour already, "
            f"diagnostics.max_rollbacks={policy.max_rollbacks} ({_ids(recent)})"
        )
        return replace(named, action=STOP, reason=reason, exit_code=int(ExitCode.NON_FINITE))
    first = max(0, last_step - policy.max_skipped_steps)
    reason = f"{named.reason}; back to step {first} or before, without the batches of steps {first}-{last_step - 1}"
    return replace(named, action=ROLLBACK, reason=reason, rollback=(first, first, last_step - 1))


def rollbacks_since(incidents: Iterable[Incident], moment: float) -> list[Incident]:
    """Return the incidents since a moment for which the job went back to before something."""
    return _since([one for one in incidents if one.rollback is not None], moment)


def _for_network(
    hosts: tuple[str, ...],
    ranks: tuple[int, ...],
    facts: Facts,
    history: Sequence[Incident],
    policy: Policy,
    now: float,
    text: str = "",
) -> Response:
    """Tolerate a host's first trouble with the network, and evict it when that comes again soon."""
    text = text or f"victims lost the connection to {_names(hosts)}"
    named = Response(RESTART, text, label=Label.NETWORK, culprit_hosts=hosts, culprit_ranks=ranks)
    recent = _since(history, now - policy.network_window_s)
    times = _times(hosts, [one for one in recent if one.label == Label.NETWORK])
    cordoned = tuple(host for host in hosts if times[host] >= policy.network_failures)
    if cordoned:
        reason = f"{text}; {_names_of_times(cordoned, times)} within {policy.network_window_s:g} s"
        return replace(named, action=EVICT, reason=reason, culprit_hosts=cordoned, cordoned=cordoned)
    return named


def _again_and_again(
    response: Response, facts: Facts, history: Sequence[Incident], policy: Policy, now: float
) -> Response:
    """Give up hosts that failed too often, whatever it was each time, where the job can go on without them."""
    most = max(1.0, policy.max_vanished_fraction * len(set(facts.host_of.values())))

    def is_of_hosts(kind: IncidentKind, label: str, num_culprits: int) -> bool:
        is_its_own = kind is IncidentKind.HOST_LOST or (kind is IncidentKind.FAILURE and label not in _BLAMELESS)
        return is_its_own and num_culprits <= most  # many at once are not to blame, but what they share

    if not is_of_hosts(response.kind, response.label, len(response.culprit_hosts)):
        return response
    recent = _since(history, now - HOUR_S)
    alike = [one for one in recent if is_of_hosts(one.kind, one.label, len(one.culprit_hosts))]
    hosts, ranks = set(response.culprit_hosts), set(response.culprit_ranks)
    if any(ranks.intersection(one.culprit_ranks) and hosts.isdisjoint(one.culprit_hosts) for one in alike):
        return response  # it goes with the rank, not with the host
    times = _times(response.culprit_hosts, alike)
    often = tuple(host for host in response.culprit_hosts if times[host] >= policy.host_failures_per_hour)
    if not often or set(often) <= set(response.cordoned):
        return response
    reason = f"{response.reason}; {_names_of_times(often, times)} within an hour"
    if not policy.best_count(len(facts.fit - set(often))):
        return replace(response, reason=f"{reason}, and the job cannot go on without it")
    return replace(response, action=EVICT, reason=reason, cordoned=tuple(dict.fromkeys((*response.cordoned, *often))))


def _verdict_on(failure: RankFailure) -> tuple[str, str]:
    """Return label and action; an exit code of megatrain's own says more than a log."""
    by_code = _LABEL_OF_CODE.get(ExitCode(failure.exit_code)) if failure.exit_code in set(ExitCode) else None
    if by_code is not None:
        return by_code, ACTIONS[by_code]
    if failure.action or failure.label not in set(Label):
        return failure.label, failure.action
    return failure.label, ACTIONS[Label(failure.label)]


def _is_again(label: str, facts: Facts, history: Sequence[Incident]) -> bool:
    """Say whether the failure before was of the same kind and no step beyond it was completed since."""
    before = next((one for one in reversed(history) if is_automatic(one)), None)
    if before is None or before.label != label:
        return False
    return step_of(facts.last_step) <= step_of(before.last_step)


def _brake(response: Response, facts: Facts, history: Sequence[Incident], policy: Policy, now: float) -> Response:
    """Stop where there were too many restarts within an hour, or too many that led nowhere."""
    budget = restart_budget(
        history,
        facts.last_step,
        now,
        per_hour=policy.restarts_per_hour,
        without_progress=policy.restarts_without_progress,
    )
    root = root_of(facts.failures)
    code = int(ExitCode.FAILURE) if root is None else _exit_code_of(root)
    if len(budget.recent) >= policy.restarts_per_hour:
        reason = (
            f"{response.reason}; the {_nth(len(budget.recent) + 1)} failure within an hour, "
            f"recovery.restarts_per_hour={policy.restarts_per_hour} ({_ids(budget.recent)})"
        )
        return replace(response, action=STOP, reason=reason, exit_code=code)
    if len(budget.fruitless) >= policy.restarts_without_progress:
        reason = (
            f"{response.reason}; {len(budget.fruitless)} restarts in a row completed no new step, "
            f"recovery.restarts_without_progress={policy.restarts_without_progress} ({_ids(budget.fruitless)})"
        )
        return replace(response, action=STOP, reason=reason, exit_code=code)
    return response


def _since(incidents: Sequence[Incident], moment: float) -> list[Incident]:
    """Return the incidents since a moment, by the clocks of drivers: those of hosts may be wrong."""
    return [one for one in incidents if one.moments.detected >= moment]


def _times(hosts: Sequence[str], alike: Sequence[Incident]) -> dict[str, int]:
    """Return for each host the number of times with this one."""
    return {host: 1 + sum(1 for one in alike if host in one.culprit_hosts) for host in hosts}


def _names_of_times(hosts: Sequence[str], times: Mapping[str, int]) -> str:
    """Return "host-1 for the 3rd time", with the number of the others where there are many."""
    shown = ", ".join(f"{host} for the {_nth(times[host])} time" for host in hosts[:4])
    return shown + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _exit_code_of(failure: RankFailure) -> int:
    return failure.exit_code if failure.exit_code > 0 else int(ExitCode.FAILURE)


def _end_of(failure: RankFailure, facts: Facts) -> str:
    text = rank_and_end(failure, facts.host_of.get(failure.rank))
    return f"{text}: {failure.line.strip()}" if failure.line else text


def _ids(incidents: Sequence[Incident]) -> str:
    shown = [incident.incident_id for incident in incidents[-5:]]
    more = len(incidents) - len(shown)
    return ", ".join(shown) + (f" and {more} before" if more else "")


def _names(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _nth(number: int) -> str:
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
