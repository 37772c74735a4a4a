"""Limits on restarts: a response may become an eviction of a host that fails too often, or a stop of the job.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import Incident, IncidentKind
from megatrain.formatting import count_text, names_text
from megatrain_job.failures.culprit import root_of
from megatrain_job.failures.verdict import label_row
from megatrain_job.jobs.restart_budget import HOUR_S, restart_budget
from megatrain_launcher.driver.evictions import EvictionReason
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.response import EVICT, STOP, Facts, Response, exit_code_of


def evict_if_recurring(
    response: Response, facts: Facts, history: Sequence[Incident], policy: Policy, now: float
) -> Response:
    """Evict hosts that were lost or failed too often by their own fault, if the job can continue without them."""
    most = max(1.0, policy.max_vanished_fraction * len(set(facts.host_of.values())))

    def counts_against_host(kind: IncidentKind, label: str, num_culprits: int) -> bool:
        is_host_fault = kind is IncidentKind.HOST_LOST or (
            kind is IncidentKind.FAILURE and label_row(label).counts_against_host
        )
        return is_host_fault and num_culprits <= most  # if many hosts fail at once, the cause is shared

    if not counts_against_host(response.kind, response.label, len(response.culprit_hosts)):
        return response
    recent = incidents_since(history, now - HOUR_S)
    alike = [
        incident
        for incident in recent
        if counts_against_host(incident.kind, incident.label, len(incident.culprit_hosts))
    ]
    hosts, ranks = set(response.culprit_hosts), set(response.culprit_ranks)
    if any(
        ranks.intersection(incident.culprit_ranks) and hosts.isdisjoint(incident.culprit_hosts) for incident in alike
    ):
        return response  # the failure follows the rank, not the host
    times = failure_counts(response.culprit_hosts, alike)
    often = tuple(host for host in response.culprit_hosts if times[host] >= policy.host_failures_per_hour)
    if not often or set(often) <= set(response.cordoned):
        return response
    reason = EvictionReason.FAILURES.text(failure=response.reason, times=names_with_counts(often, times))
    if not policy.best_count(len(facts.fit - set(often))):
        them = "it" if len(often) == 1 else "them"
        return replace(response, reason=f"{reason}, and the job cannot continue without {them}")
    return replace(response, action=EVICT, reason=reason, cordoned=tuple(dict.fromkeys((*response.cordoned, *often))))


def limit_restarts(
    response: Response, facts: Facts, history: Sequence[Incident], policy: Policy, now: float
) -> Response:
    """Stop after too many restarts within an hour, or too many without progress."""
    budget = restart_budget(
        history,
        facts.last_step,
        now,
        per_hour=policy.restarts_per_hour,
        without_progress=policy.restarts_without_progress,
    )
    root = root_of(facts.failures)
    code = int(ExitCode.FAILURE) if root is None else exit_code_of(root)
    if len(budget.recent) >= policy.restarts_per_hour:
        reason = (
            f"{response.reason}; the {_ordinal(len(budget.recent) + 1)} failure within an hour, "
            f"recovery.restarts_per_hour={policy.restarts_per_hour} ({incident_ids(budget.recent)})"
        )
        return replace(response, action=STOP, reason=reason, exit_code=code)
    if len(budget.without_new_step) >= policy.restarts_without_progress:
        restarts = budget.without_new_step
        reason = (
            f"{response.reason}; {count_text(len(restarts), 'restart')} in a row completed no new step, "
            f"recovery.restarts_without_progress={policy.restarts_without_progress} ({incident_ids(restarts)})"
        )
        return replace(response, action=STOP, reason=reason, exit_code=code)
    return response


def incidents_since(incidents: Sequence[Incident], moment: float) -> list[Incident]:
    """Return the incidents since `moment`, by the time at which a driver detected each; host clocks may be wrong."""
    return [incident for incident in incidents if incident.moments.detected >= moment]


def failure_counts(hosts: Sequence[str], alike: Sequence[Incident]) -> dict[str, int]:
    """Return how often each host has failed, including this time."""
    return {host: 1 + sum(1 for incident in alike if host in incident.culprit_hosts) for host in hosts}


def names_with_counts(hosts: Sequence[str], times: Mapping[str, int]) -> str:
    """Return "host-1 for the 3rd time and host-2 for the 4th time"; at most four hosts are named."""
    return names_text([f"{host} for the {_ordinal(times[host])} time" for host in hosts], 4)


def incident_ids(incidents: Sequence[Incident]) -> str:
    """Return the ids of up to the last five incidents, then the number of earlier ones."""
    shown = [incident.incident_id for incident in incidents[-5:]]
    more = len(incidents) - len(shown)
    return ", ".join(shown) + (f" and {more} before" if more else "")


def _ordinal(number: int) -> str:
    """Return "1st", "2nd" and so on."""
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
