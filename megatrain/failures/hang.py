"""A hang's suspects from the ranks' last sequence numbers: who never entered which collective, who waits for whom.

Pure: positions in, suspects and the reason out (DESIGN decision 13). The idea: in each group the ranks that are behind
hold up those that entered; a rank that is behind in one group because it waits in another is a victim itself, so the
suspects are the ends of the chains of waiting. A rank without data is one that logs nothing (MegaScale sec. 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Confidence(StrEnum):
    """How far the suspects are to be believed."""

    CERTAIN = "certain"
    """All ranks have data, and the chains of waiting end at ranks that wait for nobody."""
    LIKELY = "likely"
    """The suspects are those who log nothing, and others wait for them."""
    WEAK = "weak"
    """The ranks wait in a circle: they disagree about the order of collectives, or a network path is broken."""
    INSUFFICIENT = "insufficient"
    """Nobody waits, or nobody has data."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands in a group: the last collectives that it entered and finished, 0 before the first."""

    entered: int
    finished: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A collective that some members of a group wait in and others never entered."""

    group: str
    sequence: int
    waiting: tuple[int, ...]
    """Ranks that entered and did not finish it."""
    absent: tuple[int, ...]
    """Members with data that did not enter it."""
    silent: tuple[int, ...]
    """Members without data."""


@dataclass(frozen=True, slots=True)
class HangReport:
    """Suspects first; `missing` and `waits_for` are the evidence."""

    suspects: tuple[int, ...]
    confidence: Confidence
    reason: str
    missing: tuple[Missing, ...]
    waits_for: Mapping[int, tuple[int, ...]]
    """For each waiting rank the ranks that have not come to the collective that it waits in."""
    silent: tuple[int, ...]
    """Those who log nothing."""


def hang_suspects(
    positions: Mapping[int, Mapping[str, Position]], groups: Mapping[str, Sequence[int]], silent: Iterable[int] = ()
) -> HangReport:
    """Return who holds up a job that makes no progress.

    `positions`: by rank, then by group. `groups`: the members of each group. Members of a group without an entry in
    `positions` log nothing, and so do the ranks in `silent`, whatever they said before.
    """
    mute = set(silent) | {rank for members in groups.values() for rank in members if rank not in positions}
    missing = tuple(
        found
        for group in sorted(groups)
        for found in _missing(group, sorted(set(groups[group])), positions, mute)
    )  # fmt: skip
    waits_for = _waits_for(missing)
    suspects, confidence, reason = _suspects(missing, waits_for, mute)
    ordered = {others: tuple(sorted(others)) for others in set(waits_for.values())}
    return HangReport(
        suspects=tuple(sorted(suspects)),
        confidence=confidence,
        reason=reason,
        missing=missing,
        waits_for={rank: ordered[waits_for[rank]] for rank in sorted(waits_for)},
        silent=tuple(sorted(mute)),
    )


def _missing(
    group: str, members: list[int], positions: Mapping[int, Mapping[str, Position]], mute: set[int]
) -> list[Missing]:
    """Return the collectives of a group in which somebody waits."""
    known = {rank: positions[rank].get(group, Position(0, 0)) for rank in members if rank not in mute}
    quiet = tuple(rank for rank in members if rank in mute)
    found: list[Missing] = []
    for sequence in sorted({at.finished + 1 for at in known.values() if at.entered > at.finished}):
        waiting = tuple(rank for rank, at in known.items() if at.finished < sequence <= at.entered)
        absent = tuple(rank for rank, at in known.items() if at.entered < sequence)
        found.append(Missing(group, sequence, waiting, absent, quiet))
    return found


def _waits_for(missing: Iterable[Missing]) -> dict[int, frozenset[int]]:
    """Return for each waiting rank whom it waits for. Those who wait in one collective share a set: there are many."""
    found: dict[int, frozenset[int]] = {}
    for entry in missing:
        others = frozenset((*entry.absent, *entry.silent))
        for rank in entry.waiting:
            found[rank] = found[rank] | others if rank in found else others
    return found


def _suspects(
    missing: tuple[Missing, ...], waits_for: Mapping[int, frozenset[int]], mute: set[int]
) -> tuple[set[int], Confidence, str]:
    if not missing:
        if mute:
            return set(), Confidence.INSUFFICIENT, f"nobody waits in a collective; {_log_nothing(mute)}"
        return set(), Confidence.INSUFFICIENT, "nobody waits in a collective"
    blocked_on: set[int] = set().union(*set(waits_for.values()))
    if not blocked_on:
        first = missing[0]
        return set(), Confidence.WEAK, (
            f"all members entered collective {first.sequence} of {first.group} and none finished it: "
            "the network between them, or a GPU that runs it, is broken"
        )  # fmt: skip
    ends = {rank for rank in blocked_on if not waits_for.get(rank)}
    talking = ends - mute
    if talking:
        return talking, Confidence.LIKELY if mute else Confidence.CERTAIN, _why(missing, talking, mute)
    if ends:
        return (
            ends,
            Confidence.LIKELY,
            _log_nothing(ends) + f", and {len(waits_for)} ranks wait for {'it' if len(ends) == 1 else 'them'}",
        )
    circle = _circle(waits_for)
    return circle, Confidence.WEAK, (
        f"{_ranks(circle)} wait for one another in different groups: they call collectives in different orders"
    )  # fmt: skip


def _why(missing: tuple[Missing, ...], suspects: set[int], mute: set[int]) -> str:
    entry = next(entry for entry in missing if suspects.intersection(entry.absent))
    text = (
        f"{_ranks(suspects)} never entered collective {entry.sequence} of {entry.group}, "
        f"in which {_ranks(entry.waiting)} wait"
    )
    return f"{text}; {_log_nothing(mute)}" if mute else text


def _log_nothing(ranks: set[int]) -> str:
    return f"{_ranks(ranks)} {'logs' if len(ranks) == 1 else 'log'} nothing"


def _circle(waits_for: Mapping[int, frozenset[int]]) -> set[int]:
    """Return the ranks that are left when all who only wait for others of the circle are taken away."""
    left = set(waits_for)
    while True:
        needed = {other for rank in left for other in waits_for[rank]} & left
        if needed == left:
            return left
        left = needed


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}"
