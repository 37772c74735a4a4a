"""Which hosts are at fault, from timed all-reduces of neighbouring pairs with swapped partners. Pure.

Neighbours in the given order form a ring; each of its edges is tested once, so every host meets two partners. In a pair
that failed or was slow, one of the two is at fault. A host that was in a good pair is cleared; a host whose every pair
was bad is a culprit if one of its partners is cleared, else a suspect. Computing is timed separately, before partners
meet, and is each host's own.
Source: the two-round node check with swapped pairs, as in DLRover and ByteRobust, with culprits by exclusion only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

Pair = tuple[str, str]

NOISE_S = 0.002
"""Differences below this are the system's, not a link's."""


def num_turns(num_hosts: int) -> int:
    """Return how many turns it takes until every host has met its neighbours: a ring of odd length takes three."""
    if num_hosts < 2:
        return 0
    if num_hosts == 2:
        return 1
    return 2 + num_hosts % 2


def pairs(hosts: Sequence[str], turn: int) -> tuple[Pair, ...]:
    """Return the pairs of a turn, 0 to num_turns - 1; neighbours in the order of `hosts`, swapped each turn.

    Raises: ValueError for a turn that does not exist, or a host that is named twice.
    """
    if len(set(hosts)) != len(hosts):
        raise ValueError("a host is named twice")
    if not 0 <= turn < num_turns(len(hosts)):
        raise ValueError(f"turn {turn} of {num_turns(len(hosts))} for {len(hosts)} hosts")
    if turn == 2:
        return ((hosts[-1], hosts[0]),)
    edges = [(hosts[number], hosts[(number + 1) % len(hosts)]) for number in range(len(hosts))]
    # the edge from the last host to the first closes a ring of even length within the second turn
    return tuple(edges[turn : len(hosts) - len(hosts) % 2 : 2]) if len(hosts) > 2 else (edges[0],)


def partners(some: Sequence[Pair]) -> dict[str, str]:
    """Return each host's partner, both ways."""
    return dict(some) | {second: first for first, second in some}


@dataclass(frozen=True, slots=True)
class PairResult:
    """One host's side of one pair. A time is None if the host did not get that far, for `reason`."""

    host: str
    partner: str
    compute_s: float | None = None
    wait_s: float | None = None
    reduce_s: float | None = None
    reason: str = ""
    is_timed: bool = True
    """On a CPU, which others use too, only whether it works counts."""


@dataclass(frozen=True, slots=True)
class PairFindings:
    """What the pairs show: reasons by host. A link is bad if its pair failed while others clear both of its hosts."""

    culprits: Mapping[str, str] = field(default_factory=dict)
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Hosts in bad pairs only, whose partners were too: at least one host of each such pair is at fault."""
    bad_links: tuple[Pair, ...] = ()


def culprit_hosts(
    schedule: Sequence[Pair],
    results: Sequence[PairResult],
    max_slowdown: float,
    hardware: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the hosts at fault, in the order of the schedule."""
    return tuple(judge_pairs(schedule, results, max_slowdown, hardware).culprits)


def judge_pairs(
    schedule: Sequence[Pair],
    results: Sequence[PairResult],
    max_slowdown: float,
    hardware: Mapping[str, str] | None = None,
) -> PairFindings:
    """Return which hosts are at fault. `schedule`: the pairs of all turns; a pair without both results has failed.

    `hardware`: the kind of each host; computing is compared among hosts of one kind.
    """
    hosts = list(dict.fromkeys(host for pair in schedule for host in pair))
    found = {(result.host, result.partner): result for result in results}
    bad = _bad_pairs(schedule, found, max_slowdown)
    cleared = {host for pair in schedule if pair not in bad for host in pair}
    culprits = _slow_computers(results, max_slowdown, hardware or {})
    suspects: dict[str, str] = {}
    for host in hosts:
        own = {pair: reason for pair, reason in bad.items() if host in pair}
        if host in cleared or not own or host in culprits:
            continue
        why = "; ".join(f"with {_other(pair, host)}: {reason}" for pair, reason in own.items())
        if any(_other(pair, host) in cleared for pair in own):
            culprits[host] = why
        else:
            suspects[host] = why
    # a culprit explains its bad pairs: a host with no other bad pairs is no suspect
    for host in list(suspects):
        others = {_other(pair, host) for pair in bad if host in pair}
        if others <= culprits.keys():
            del suspects[host]
    links = tuple(pair for pair in bad if set(pair) <= cleared and not set(pair) & culprits.keys())
    return PairFindings({host: culprits[host] for host in hosts if host in culprits}, suspects, links)


def _bad_pairs(schedule: Sequence[Pair], found: Mapping[Pair, PairResult], max_slowdown: float) -> dict[Pair, str]:
    """Return the pairs that failed or were slow, and why."""
    times: dict[Pair, float] = {}
    bad: dict[Pair, str] = {}
    for pair in schedule:
        sides = [found.get(pair), found.get((pair[1], pair[0]))]
        reasons = [
            f"{host} did not answer" if side is None else f"{host}: {side.reason or 'failed'}"
            for host, side in zip(pair, sides, strict=True)
            if side is None or side.reduce_s is None
        ]
        if reasons:
            bad[pair] = ", ".join(reasons)
        elif all(side is not None and side.is_timed for side in sides):
            times[pair] = max(side.reduce_s or 0.0 for side in sides if side is not None)
    if times:
        usual = median_low(times.values())
        for pair, taken_s in times.items():
            if taken_s > usual * max_slowdown and taken_s - usual > NOISE_S:
                bad[pair] = f"all-reduce took {taken_s * 1000:.1f} ms, in other pairs {usual * 1000:.1f}"
    return {pair: bad[pair] for pair in schedule if pair in bad}


def _slow_computers(results: Sequence[PairResult], max_slowdown: float, hardware: Mapping[str, str]) -> dict[str, str]:
    """Return the hosts that compute slower than others of their kind in every turn, and why."""
    best: dict[str, float] = {}
    for result in results:
        if result.compute_s is not None and result.is_timed:
            best[result.host] = min(best.get(result.host, result.compute_s), result.compute_s)
    slow: dict[str, str] = {}
    for host, taken_s in best.items():
        usual = median_low(value for other, value in best.items() if hardware.get(other) == hardware.get(host))
        if taken_s > usual * max_slowdown and taken_s - usual > NOISE_S:
            slow[host] = f"a matrix product took {taken_s * 1000:.1f} ms, on other hosts {usual * 1000:.1f}"
    return slow


def _other(pair: Pair, host: str) -> str:
    return pair[1] if pair[0] == host else pair[0]
