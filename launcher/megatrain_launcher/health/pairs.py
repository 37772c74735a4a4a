"""Finds the hosts at fault from timed all-reduces between neighboring hosts with swapped partners. Pure functions: no
I/O and no clock.

The hosts form a ring in the given order, and each edge of the ring is tested once, so every host has two partners. If a
pair failed or was slow, at least one of its hosts, or their link, is at fault. A host in a good pair is cleared. A host
with only bad pairs is a culprit if one of its partners is cleared, else a suspect unless all its partners are culprits.
Each host's own computation is timed separately, before the partners connect; a host that is slow there is a culprit
too.
Source: the two-round node check with swapped pairs, as in DLRover and ByteRobust, with culprits by exclusion only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

Pair = tuple[str, str]

NOISE_S = 0.002
"""Smaller differences are noise of the system, not a slow link."""


def num_turns(num_hosts: int) -> int:
    """Return the number of turns that pair all neighbors.

    Zero for one host, one for two hosts, two for a larger even number, and three for an odd number.
    """
    if num_hosts < 2:
        return 0
    if num_hosts == 2:
        return 1
    return 2 + num_hosts % 2


def pairs(hosts: Sequence[str], turn: int) -> tuple[Pair, ...]:
    """Return the pairs of turn 0 to num_turns - 1: neighbors in the order of `hosts`, with other partners each turn.

    Raises: ValueError for a turn that does not exist, or a duplicate host.
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
    """Return each host's partner, for both hosts of each pair."""
    return dict(some) | {second: first for first, second in some}


@dataclass(frozen=True, slots=True)
class PairResult:
    """One host's result of a pair. A time is None if the host failed before it was measured; `reason` says why."""

    host: str
    partner: str
    compute_s: float | None = None
    wait_s: float | None = None
    reduce_s: float | None = None
    reason: str = ""
    is_timed: bool = True
    """Whether the times count. False on a CPU, which other programs use too: only success counts there."""


@dataclass(frozen=True, slots=True)
class PairFindings:
    """The findings, with reasons by host. A link is bad if its pair is bad but other pairs clear both hosts."""

    culprits: Mapping[str, str] = field(default_factory=dict)
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Hosts with only bad pairs, and without a cleared partner: at least one host of each pair is at fault."""
    bad_links: tuple[Pair, ...] = ()


def judge_pairs(
    schedule: Sequence[Pair],
    results: Sequence[PairResult],
    max_slowdown: float,
    hardware: Mapping[str, str] | None = None,
) -> PairFindings:
    """Return the hosts at fault. `schedule`: the pairs of all turns; a pair without both results has failed.

    `hardware`: the kind of each host; computation times are compared among hosts of one kind.
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
    # a host is not a suspect if all of its bad pairs have a culprit as partner
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
                bad[pair] = f"all-reduce took {taken_s * 1000:.1f} ms, but {usual * 1000:.1f} ms in other pairs"
    return {pair: bad[pair] for pair in schedule if pair in bad}


def _slow_computers(results: Sequence[PairResult], max_slowdown: float, hardware: Mapping[str, str]) -> dict[str, str]:
    """Return, with reasons, the hosts whose best computation time is slow compared with other hosts of their kind."""
    best: dict[str, float] = {}
    for result in results:
        if result.compute_s is not None and result.is_timed:
            best[result.host] = min(best.get(result.host, result.compute_s), result.compute_s)
    slow: dict[str, str] = {}
    for host, taken_s in best.items():
        usual = median_low(value for other, value in best.items() if hardware.get(other) == hardware.get(host))
        if taken_s > usual * max_slowdown and taken_s - usual > NOISE_S:
            slow[host] = (
                f"a matrix multiplication took {taken_s * 1000:.1f} ms, but {usual * 1000:.1f} ms on other hosts"
            )
    return slow


def _other(pair: Pair, host: str) -> str:
    return pair[1] if pair[0] == host else pair[0]
