"""Finds the ranks that hold up a stuck round, from the evidence of all hosts. Pure functions: no I/O and no clock.

The rules are in megatrain_job.failures.hang: a stopped or dead process is the strongest evidence; without one, the last
sequence numbers of collectives decide. Ranks of a host without evidence count as silent, as without a black box.
megatrain_job.failures.gpu_faults adds the errors of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.records.host_records import HangEvidence, RankEvidence
from megatrain.contracts.records.rounds import Round
from megatrain.formatting import count_text
from megatrain_job.failures.gpu_faults import GpuFault, blame, fault_of, worst_of
from megatrain_job.failures.hang import IMMOBILE, Confidence, HangReport, hang_suspects
from megatrain_job.failures.hang_activity import reported_positions

_MAX_SENTENCES = 12
_RANGE = 3
"""A range of ranks is described by this many numbers: the first rank, the number of ranks, the stride."""
ERRORS_BEFORE_S = 60.0
"""An error of a GPU counts if it occurred at most this long before the ranks' last sign of life: the host's ranks go on
until they need that GPU, which is within a step."""
_MAX_SILENCE_S = 3600.0


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
        silent.update(part.ranks)
    silent = {rank for rank in silent if 0 <= rank < round_.world_size}
    busy = [rank for rank, rank_evidence in known.items() if rank_evidence.is_busy]
    states = {
        rank: rank_evidence.process_state for rank, rank_evidence in known.items() if 0 <= rank < round_.world_size
    }
    positions = {rank: reported_positions(rank_evidence) for rank, rank_evidence in known.items()}
    report = hang_suspects(positions, _groups(evidence, round_), silent, busy, states)
    complaints = (*stalls, *(f"{part.host} sent no evidence" for part in without_evidence))
    suspects = tuple(rank for rank in report.suspects if 0 <= rank < round_.world_size)
    host_of = {rank: part.host for part in round_.hosts for rank in part.ranks if rank < round_.world_size}
    faults = gpu_faults(evidence)
    if not suspects and round_.world_size == 1:
        alone = ["the only rank makes no progress", *(fault.text for fault in faults.values())]
        whole = _cut([*alone, *_step_sentences(known, (0,)), *complaints])
        return CulpritFinding((0,), _hosts(round_, (0,)), Confidence.CERTAIN, whole)
    found = blame(report, suspects, host_of, faults)
    sentences = [
        report.reason, *found.reasons, *_step_sentences(known, found.ranks), *_collective_sentences(report), *complaints
    ]  # fmt: skip
    at_storage = [rank for rank in found.ranks if rank in known and _is_at_storage(known[rank])]
    return CulpritFinding(
        found.ranks,
        found.hosts,
        found.confidence,
        _cut(sentences),
        _storage_sentence(known[at_storage[0]]) if at_storage and len(at_storage) == len(found.ranks) else "",
    )


def gpu_faults(evidence: Mapping[str, HangEvidence]) -> dict[str, GpuFault]:
    """Return the worst GPU error of each host during the hang; hosts without an error are left out.

    Ages are measured by each host's own clock, so differing clocks have no effect.
    """
    silences = [
        host_evidence.at_unix_s - rank.newest_unix_s
        for host_evidence in evidence.values()
        for rank in host_evidence.ranks
    ]
    oldest_s = ERRORS_BEFORE_S + min(max([0.0, *silences]), _MAX_SILENCE_S)
    worst = {
        host: worst_of(
            fault
            for error in evidence[host].gpu_errors
            if 0.0 <= error.age_s <= oldest_s
            and (fault := fault_of(host, error.gpu, error.number, error.text, error.age_s)) is not None
        )
        for host in sorted(evidence)
    }
    return {host: fault for host, fault in worst.items() if fault is not None}


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
    parts = (part for part in round_.hosts if not wanted.isdisjoint(part.ranks))
    return tuple(dict.fromkeys(part.host for part in sorted(parts, key=lambda part: part.first_rank)))


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


def _storage_sentence(rank_evidence: RankEvidence) -> str:
    awaited = "its data" if rank_evidence.in_flight == Operation.DATA_WAIT else "storage"
    return f"rank {rank_evidence.rank} waits for {awaited}"


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
        f"collective {missing.sequence} of {missing.group}: {count_text(len(missing.waiting), 'rank')} waiting in it, "
        f"{len(missing.absent)} that never entered it, {len(missing.silent)} silent"
        for missing in report.missing
    ]


def _cut(sentences: list[str]) -> tuple[str, ...]:
    kept = [sentence for sentence in dict.fromkeys(sentences) if sentence]
    if len(kept) <= _MAX_SENTENCES:
        return tuple(kept)
    return (*kept[: _MAX_SENTENCES - 1], f"and {len(kept) - _MAX_SENTENCES + 1} more")
