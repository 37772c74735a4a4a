"""Finds the suspects of a hang from the ranks' last sequence numbers: which rank never entered which collective, and
which ranks wait for it.

Pure functions from positions to suspects and a reason (ADR 0012, ADR 0046). In each group, the ranks that are behind
hold up those that entered a collective. A rank that is behind because it waits in another group is itself a victim, so
the suspects are the ends of the chains of waiting. An operation that a rank has started and does not wait for makes no
victim of this rank. A rank without data is called silent: it logs nothing (MegaScale sec. 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Final

from megatrain.contracts.black_box.operations import Operation
from megatrain.formatting import count_text, ranks_text

_AROUND_OTHERS = (Operation.STEP, Operation.EVALUATION, Operation.BARRIER, Operation.CLIP)
"""Spans that contain exchanges with other ranks: they do not show that the rank's CPU thread itself is busy."""
IMMOBILE: Final = MappingProxyType(
    {
        "T": "is stopped (T)",
        "t": "is stopped by a debugger (t)",
        "Z": "is dead (Z)",
        "X": "is dead (X)",
        "": "has no process",
    }
)
"""Descriptions of a process that cannot run, by its state letter in /proc."""
NO_STATES: Final[Mapping[int, str]] = MappingProxyType({})
_MAX_LISTED = 8


class Confidence(StrEnum):
    """The certainty of the suspects."""

    CERTAIN = "certain"
    """A suspect is stopped or dead, or it never entered a collective in which others wait and no rank is silent."""
    LIKELY = "likely"
    """The suspects are silent and others wait for them, or they left a collective before its end, or they never entered
    one but a rank is silent, or they are suspects only if busy ranks are assumed to wait for no rank."""
    WEAK = "weak"
    """All members are inside one collective, so there is no suspect: the network, or a GPU, is broken. Or the suspects
    wait for one another in a circle, because they call collectives in different orders."""
    INSUFFICIENT = "insufficient"
    """No rank waits in a collective, or no rank has data: there is no suspect."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank in a group: the last collectives that it entered and finished; 0 before the first."""

    entered: int
    finished: int
    awaited: int | None = None
    """The collective that the rank's CPU thread waits for, or waited for last; 0: none of this group; None: unknown."""

    @property
    def waits_in(self) -> int:
        """Return the collective that the rank waits in, 0 if it does not wait in this group."""
        if self.awaited is None:
            return self.finished + 1 if self.entered > self.finished else 0
        return self.awaited if self.awaited > self.finished else 0


@dataclass(frozen=True, slots=True)
class Missing:
    """A collective in which some members of a group wait, and the members that hold it up."""

    group: str
    sequence: int
    waiting: tuple[int, ...]
    """Members that entered the collective and wait for its end."""
    absent: tuple[int, ...]
    """Members with data that did not enter the collective."""
    silent: tuple[int, ...]
    """Members without data."""
    not_waiting: tuple[int, ...] = ()
    """Members that entered the collective and do not wait for its end; empty if a member is absent or silent."""

    @property
    def held_up_by(self) -> frozenset[int]:
        """Return the members that the others wait for."""
        return frozenset((*self.absent, *self.silent, *self.not_waiting))


@dataclass(frozen=True, slots=True)
class HangReport:
    """The suspects of a hang; `missing` and `waits_for` are the evidence."""

    suspects: tuple[int, ...]
    confidence: Confidence
    reason: str
    missing: tuple[Missing, ...]
    waits_for: Mapping[int, tuple[int, ...]]
    """For each waiting rank, the ranks that it waits for."""
    silent: tuple[int, ...]
    """The ranks without data."""

    @property
    def is_firm(self) -> bool:
        """Whether the suspects are certain enough to be called culprits."""
        return bool(self.suspects) and self.confidence in (Confidence.CERTAIN, Confidence.LIKELY)


def is_own_work(operation: str) -> bool:
    """Return whether an open span of this operation shows that the CPU thread is busy, and waits for no rank."""
    known = next((candidate for candidate in Operation if candidate.value == operation), None)
    return known is not None and not (known.is_collective or known.is_point_to_point or known in _AROUND_OTHERS)


def hang_suspects(
    positions: Mapping[int, Mapping[str, Position]],
    groups: Mapping[str, Sequence[int]],
    silent: Iterable[int] = (),
    busy: Iterable[int] = (),
    states: Mapping[int, str] = NO_STATES,
) -> HangReport:
    """Return which ranks hold up a job that makes no progress.

    positions: by rank, then by group. groups: the members of each group. silent: further ranks without data; members
    that have no entry in `positions` are silent too. busy: ranks in local work that began after all their open
    exchanges. An accelerator may lag behind its CPU, so `busy` is used only if the positions alone give weak
    confidence: then a busy rank is assumed to wait for no rank. states: the /proc state letters of the ranks'
    processes, read while the round ran; empty text: there was no process. A process that cannot run is the strongest
    evidence: it waits for no rank, and the collectives in which others wait for it do not show a problem of the
    network.
    """
    silent, busy = tuple(silent), tuple(busy)
    immobile = {rank: IMMOBILE[state] for rank, state in sorted(states.items()) if state in IMMOBILE}
    if immobile:
        return _of_immobile(_report(_idle(positions, immobile), groups, silent), immobile)
    first = _report(positions, groups, silent)
    if first.confidence is not Confidence.WEAK or not busy:
        return first
    second = _report(_idle(positions, busy), groups, silent)
    is_plain = second.confidence in (Confidence.CERTAIN, Confidence.LIKELY)
    return replace(second, confidence=Confidence.LIKELY) if is_plain else first


def _idle(
    positions: Mapping[int, Mapping[str, Position]], ranks: Iterable[int]
) -> Mapping[int, Mapping[str, Position]]:
    """Return the positions, changed so that the given ranks wait for no collective."""
    known = (rank for rank in ranks if rank in positions)
    idle = {rank: {name: replace(at, awaited=0) for name, at in positions[rank].items()} for rank in known}
    return {**positions, **idle}


def _of_immobile(report: HangReport, immobile: Mapping[int, str]) -> HangReport:
    """Return the report with the processes that cannot run as the only suspects."""
    reasons = [f"rank {rank} {state}" for rank, state in islice(immobile.items(), _MAX_LISTED)]
    reasons += [f"{len(immobile) - _MAX_LISTED} more cannot run either"] if len(immobile) > _MAX_LISTED else []
    entry = closest(entry for entry in report.missing if not immobile.keys().isdisjoint(entry.held_up_by))
    if entry is not None:
        whom = "it" if len(immobile) == 1 else "them"
        reasons.append(f"{_waits(entry.waiting)} for {whom} in collective {entry.sequence} of {entry.group}")
    return replace(report, suspects=tuple(immobile), confidence=Confidence.CERTAIN, reason="; ".join(reasons))


def _report(
    positions: Mapping[int, Mapping[str, Position]], groups: Mapping[str, Sequence[int]], silent: Iterable[int]
) -> HangReport:
    all_silent = set(silent) | {rank for members in groups.values() for rank in members if rank not in positions}
    missing = tuple(
        found
        for group in sorted(groups)
        for found in _missing(group, sorted(set(groups[group])), positions, all_silent)
    )  # fmt: skip
    waits_for = _waits_for(missing)
    suspects, confidence, reason = _suspects(missing, waits_for, all_silent)
    ordered = {others: tuple(sorted(others)) for others in set(waits_for.values())}
    return HangReport(
        suspects=tuple(sorted(suspects)),
        confidence=confidence,
        reason=reason,
        missing=missing,
        waits_for={rank: ordered[waits_for[rank]] for rank in sorted(waits_for)},
        silent=tuple(sorted(all_silent)),
    )


def _missing(
    group: str, members: list[int], positions: Mapping[int, Mapping[str, Position]], silent: set[int]
) -> list[Missing]:
    """Return the collectives of a group in which a rank waits."""
    known = {rank: positions[rank].get(group, Position(0, 0)) for rank in members if rank not in silent}
    silent_members = tuple(rank for rank in members if rank in silent)
    waits_in = {rank: at.waits_in for rank, at in known.items()}
    found: list[Missing] = []
    for sequence in sorted({number for number in waits_in.values() if number}):
        waiting = tuple(rank for rank, number in waits_in.items() if number == sequence)
        absent = tuple(rank for rank, at in known.items() if at.entered < sequence)
        not_waiting: tuple[int, ...] = ()
        if not absent and not silent_members:
            not_waiting = tuple(
                rank
                for rank, at in known.items()
                if at.awaited is not None and at.finished < sequence and not waits_in[rank]
            )
        found.append(Missing(group, sequence, waiting, absent, silent_members, not_waiting))
    return found


def closest(missing: Iterable[Missing]) -> Missing | None:
    """Return the most informative of the collectives: the one that the fewest ranks hold up."""
    return min(missing, key=lambda entry: (len(entry.held_up_by), len(entry.waiting)), default=None)


def _waits_for(missing: Iterable[Missing]) -> dict[int, frozenset[int]]:
    """Return for each waiting rank the ranks that it waits for.

    Ranks that wait in one collective share one set object, because there are many ranks.
    """
    found: dict[int, frozenset[int]] = {}
    for entry in missing:
        others = entry.held_up_by
        for rank in entry.waiting:
            found[rank] = found[rank] | others if rank in found else others
    return found


def _suspects(
    missing: tuple[Missing, ...], waits_for: Mapping[int, frozenset[int]], silent: set[int]
) -> tuple[set[int], Confidence, str]:
    if not missing:
        if silent:
            return set(), Confidence.INSUFFICIENT, f"no rank waits in a collective; {_log_nothing(silent)}"
        return set(), Confidence.INSUFFICIENT, "no rank waits in a collective"
    blocked_on: set[int] = set().union(*set(waits_for.values()))
    # a rank that waits in a collective that all others have entered is held up by no rank
    ends = {rank for rank in blocked_on if rank not in waits_for}
    talking = ends - silent
    if talking:
        reason, is_plain = _why(missing, talking, silent)
        return talking, Confidence.CERTAIN if is_plain and not silent else Confidence.LIKELY, reason
    if ends:
        return (
            ends,
            Confidence.LIKELY,
            _log_nothing(ends)
            + f", and {count_text(len(waits_for), 'rank waits', 'ranks wait')}"
            + f" for {'it' if len(ends) == 1 else 'them'}",
        )
    full = next((entry for entry in missing if not entry.held_up_by), None)
    if full is not None:
        return set(), Confidence.WEAK, (
            f"all members entered collective {full.sequence} of {full.group} and none finished it: "
            "the network between them, or a GPU that runs it, is broken"
        )  # fmt: skip
    circle = _circle(waits_for)
    return circle, Confidence.WEAK, (
        f"{ranks_text(circle)} wait for one another in different groups: they call collectives in different orders"
    )  # fmt: skip


def _why(missing: tuple[Missing, ...], suspects: set[int], silent: set[int]) -> tuple[str, bool]:
    """Return the reason as text, and whether the suspects never entered a collective in which others wait."""
    entry = closest(entry for entry in missing if suspects.intersection(entry.absent))
    if entry is not None:
        text = (
            f"{ranks_text(suspects)} never entered collective {entry.sequence} of {entry.group}, "
            f"in which {_waits(entry.waiting)}"
        )
    else:
        inside = next(entry for entry in missing if suspects.intersection(entry.not_waiting))
        text = (
            f"{ranks_text(suspects)} entered collective {inside.sequence} of {inside.group} and went on to something "
            f"else before its end, for which {_waits(inside.waiting)}"
        )
    return (f"{text}; {_log_nothing(silent)}" if silent else text), entry is not None


def _log_nothing(ranks: set[int]) -> str:
    return f"{ranks_text(ranks)} {'logs' if len(ranks) == 1 else 'log'} nothing"


def _waits(ranks: Iterable[int]) -> str:
    numbers = tuple(ranks)
    return f"{ranks_text(numbers)} {'waits' if len(numbers) == 1 else 'wait'}"


def _circle(waits_for: Mapping[int, frozenset[int]]) -> set[int]:
    """Return the ranks that wait for one another in a circle, without those that only wait for its members."""
    left = set(waits_for)
    while True:
        needed = {other for rank in left for other in waits_for[rank]} & left
        if needed == left:
            return left
        left = needed
