"""How often hosts failed in a stretch of time, and texts about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatrain.contracts.records.incident import Incident
from megatrain.formatting import names_text


def incidents_since(incidents: Sequence[Incident], moment: float) -> list[Incident]:
    """Return the incidents since `moment`, by the time at which a driver detected each; host clocks may be wrong."""
    return [incident for incident in incidents if incident.moments.detected >= moment]


def failure_counts(hosts: Sequence[str], alike: Sequence[Incident]) -> dict[str, int]:
    """Return how often each host has failed, including this time."""
    return {host: 1 + sum(1 for incident in alike if host in incident.culprit_hosts) for host in hosts}


def names_with_counts(hosts: Sequence[str], times: Mapping[str, int]) -> str:
    """Return "host-1 for the 3rd time and host-2 for the 4th time"; at most four hosts are named."""
    return names_text([f"{host} for the {ordinal(times[host])} time" for host in hosts], 4)


def incident_ids(incidents: Sequence[Incident]) -> str:
    """Return the ids of up to the last five incidents, then the number of earlier ones."""
    shown = [incident.incident_id for incident in incidents[-5:]]
    more = len(incidents) - len(shown)
    return ", ".join(shown) + (f" and {more} before" if more else "")


def ordinal(number: int) -> str:
    """Return "1st", "2nd" and so on."""
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
