"""Finds the ranks that hold up a stuck round, from the evidence of all hosts. Pure functions: no I/O and no clock.

The rules are in megatrain_job.failures.hang: a stopped or dead process is the strongest evidence; without one, the last
sequence numbers of collectives decide. Ranks of a host without evidence count as silent, as without a black box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatrain.contracts.records.host_records import HangEvidence, RankEvidence
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain_job.failures.hang import IMMOBILE, Confidence, HangReport, Position, hang_suspects

_MAX_SENTENCES = 12
_RANGE = 3
"""First rank, number of ranks, stride."""


@dataclass(frozen=True, slots=True)
class CulpritFinding:
    """The culprit, how certain it is, and the evidence as sentences, strongest first."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    confidence: str
    sentences: tuple[str, ...]
    waits_for_storage: str = ""
    """Not empty if all suspects only wait for storage, so that no rank hangs: a sentence that names one of them."""

    @property
    def is_firm(self) -> bool:
        """Whether the evidence is strong enough to count against a host."""
        return bool(self.hosts) and self.confidence in (Confidence.CERTAIN, Confidence.LIKELY)


def find_culprit(round_: Round, evidence: Mapping[str, HangEvidence], stalls: Iterable[str] = ()) -> CulpritFinding:
    """Return the culprit of a stuck round.

    `evidence`: by host, for the hosts that sent evidence; `stalls`: sentences about the stalls that hosts report.
    """
    known = {rank_evidence.rank: rank_evidence for host in sorted(evidence) for rank_evidence in evidence[host].ranks}
    without_evidence = [part for part in round_.hosts if part.host not in evidence]
    silent = {rank for host_evidence in evidence.values() for rank in host_evidence.silent}
    for part in without_evidence:
        silent.update(range(part.first_rank, part.first_rank + part.num_workers))
    silent = {rank for rank in silent if 0 <= rank < round_.world_size}
    busy = [rank for rank, rank_evidence in known.items() if rank_evidence.is_busy]
    states = {
        rank: rank_evidence.process_state for rank, rank_evidence in known.items() if 0 <= rank < round_.world_size
    }
    report = hang_suspects(_positions(known), _groups(evidence, round_), silent, busy, states)
    complaints = (*stalls, *(f"{part.host} sent no evidence" for part in without_evidence))
    suspects = tuple(rank for rank in report.suspects if 0 <= rank < round_.world_size)
    if not suspects and round_.world_size == 1:
        alone = ["the only rank makes no progress", *_step_sentences(known, (0,))]
        return CulpritFinding((0,), _hosts(round_, (0,)), Confidence.CERTAIN, _cut([*alone, *complaints]))
    sentences = [report.reason, *_step_sentences(known, suspects), *_collective_sentences(report)]
    at_storage = [rank for rank in suspects if rank in known and _is_at_storage(known[rank])]
    return CulpritFinding(
        suspects,
        _hosts(round_, suspects),
        report.confidence,
        _cut([*sentences, *complaints]),
        f"rank {at_storage[0]} waits for storage" if at_storage and len(at_storage) == len(suspects) else "",
    )


def _positions(known: Mapping[int, RankEvidence]) -> dict[int, dict[str, Position]]:
    return {
        rank: {
            group: Position(at.entered, at.left, _awaited(rank_evidence, group))
            for group, at in rank_evidence.positions.items()
        }
        for rank, rank_evidence in known.items()
    }


def _awaited(rank_evidence: RankEvidence, group: str) -> int | None:
    if not rank_evidence.awaited_group:
        return 0 if rank_evidence.is_on_device else None
    return rank_evidence.awaited if rank_evidence.awaited_group == group else 0


def _groups(evidence: Mapping[str, HangEvidence], round_: Round) -> dict[str, tuple[int, ...]]:
    """Return the members of each group, combined from all hosts; ranks that are not in the round are left out."""
    num_ranks = min(round_.world_size, sum(part.num_workers for part in round_.hosts))
    ranges = {group: numbers for host_evidence in evidence.values() for group, numbers in host_evidence.groups.items()}
    return {
        group: tuple(rank for rank in sorted(range(first, first + count * stride, stride)) if 0 <= rank < num_ranks)
        for group, (first, count, stride) in (
            (group, numbers) for group, numbers in ranges.items() if len(numbers) == _RANGE
        )
        if stride and 0 < count <= num_ranks
    }


def _hosts(round_: Round, ranks: Iterable[int]) -> tuple[str, ...]:
    wanted = set(ranks)
    parts = (part for part in round_.hosts if _has_any(part, wanted))
    return tuple(dict.fromkeys(part.host for part in sorted(parts, key=lambda part: part.first_rank)))


def _has_any(part: RoundHost, ranks: set[int]) -> bool:
    return any(rank in ranks for rank in range(part.first_rank, part.first_rank + part.num_workers))


def _step_sentences(known: Mapping[int, RankEvidence], suspects: Iterable[int]) -> list[str]:
    sentences = []
    for rank in suspects:
        rank_evidence = known.get(rank)
        if rank_evidence is not None:
            waits = ", waits in the kernel (D)" if rank_evidence.process_state == "D" else ""
            sentences.append(f"rank {rank} is at step {rank_evidence.step}{_where(rank_evidence)}{waits}")
    return sentences


def _is_at_storage(rank_evidence: RankEvidence) -> bool:
    return rank_evidence.is_at_storage and rank_evidence.process_state not in IMMOBILE


def _where(rank_evidence: RankEvidence) -> str:
    if rank_evidence.is_on_device:
        return f" in {rank_evidence.in_flight or 'work between recorded operations'} on its GPU"
    return (
        f" in {rank_evidence.in_flight}"
        if rank_evidence.in_flight
        else f" in phase {rank_evidence.phase}"
        if rank_evidence.phase
        else ""
    )


def _collective_sentences(report: HangReport) -> list[str]:
    return [
        f"collective {missing.sequence} of {missing.group}: {len(missing.waiting)} wait, {len(missing.absent)} never "
        f"entered it, {len(missing.silent)} silent"
        for missing in report.missing
    ]


def _cut(sentences: list[str]) -> tuple[str, ...]:
    kept = [sentence for sentence in dict.fromkeys(sentences) if sentence]
    if len(kept) <= _MAX_SENTENCES:
        return tuple(kept)
    return (*kept[: _MAX_SENTENCES - 1], f"and {len(kept) - _MAX_SENTENCES + 1} more")
