"""Finds the ranks that make a job slow, and the cause, in a window of compared steps.

A rank whose own compute is slow shows two signals: it computes longer than peers with the same work, and others wait.
Ranks that wait are victims. The search then names the cause: samples, garbage collection, data or the host itself.
If no rank stands out, the cause is the partition of the model, the network, or samples that slow another rank in each
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.candidates import Candidates, candidates, first_seen
from megatrain_diagnostics.analysis.findings import Finding, greatest_by_host
from megatrain_diagnostics.analysis.history import ComparedSteps
from megatrain_diagnostics.analysis.network import SlowNetwork, by_elimination, slow_groups
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.sentences import network_sentences, rank_sentences, rotating_sentence
from megatrain_diagnostics.analysis.slow_stages import slow_stages
from megatrain_diagnostics.analysis.straggler_evidence import StragglerEvidence
from megatrain_diagnostics.analysis.workload import (
    MIN_WORK_CORRELATION,
    is_explained,
    pearson,
    unexplained_s,
    work_correlation,
    work_excess,
)
from megatrain_diagnostics.events.tables import Int64

_MAX_NAMED = 16
"""Most victims, and most ranks of a rotating slowness or a slow network, that are named."""
_SHARE_OF_WORST = 0.3
"""A rank with at least this fraction of the worst rank's excess is named with it."""
_VICTIM = 0.5
_MOSTLY_ONE = 0.6


def find_stragglers(evidence: StragglerEvidence) -> tuple[Finding, ...]:
    """Return what makes the job slow, the greatest gain first; nothing while there are too few steps."""
    if not evidence.is_enough:
        return ()
    found = [*_of_ranks(evidence)]
    if not found:
        found += _rotating(evidence)
    found += slow_stages(evidence, {rank for finding in found for rank in finding.ranks})
    if not any(finding.cause is not Cause.STAGE for finding in found):
        found += _of_network(evidence)
    return tuple(sorted(found, key=lambda finding: -finding.gain_s))


def _of_ranks(evidence: StragglerEvidence) -> Iterator[Finding]:
    compute, peers, thresholds = evidence.compute, evidence.peers, evidence.thresholds
    late = [candidates(evidence.long_window, aspect, peers, thresholds) for aspect in (Aspect.GC, Aspect.DATA)]
    collecting = late[0]
    causes: dict[tuple[Cause, VerdictConfidence], list[int]] = {}
    for rank in compute.ranks.tolist():
        cause = _cause(evidence, compute, collecting, rank)
        if cause is None:
            continue
        confidence = _confidence(evidence, compute, rank)
        if cause is Cause.COMPUTE and evidence.was_explained(rank):
            confidence = VerdictConfidence.LOW  # a host is evicted for a cause that lasts, not for one that changes
        causes.setdefault((cause, confidence), []).append(rank)
    for (cause, confidence), ranks in causes.items():
        yield _finding(evidence, compute, cause, confidence, ranks)
    for cause, slow in ((Cause.GC, late[0]), (Cause.DATA, late[1])):
        ranks = slow.ranks.tolist()
        if ranks:
            named = [rank for rank in ranks if slow.excess_s[rank] >= _SHARE_OF_WORST * slow.excess_s[ranks[0]]]
            yield _finding(evidence, slow, cause, _confidence(evidence, slow, named[0]), named)


def _cause(evidence: StragglerEvidence, compute: Candidates, collecting: Candidates, rank: int) -> Cause | None:
    """Return why a rank computes long; None where another aspect reports it."""
    window, thresholds = evidence.window, evidence.thresholds
    collected_s = float(window.excess[:, Aspect.GC, rank].mean())
    mean_s = float(window.excess[:, Aspect.COMPUTE, rank].mean())
    if collecting.is_slow[rank] and mean_s - collected_s < thresholds.excess * compute.scale_s[rank]:
        return None  # collections within passes explain the whole excess
    same_stage = _same_stage(evidence, rank)
    if unexplained_s(window, rank, same_stage) >= thresholds.excess * compute.scale_s[rank]:
        return Cause.COMPUTE
    if is_explained(window, rank, same_stage, float(compute.excess_s[rank] / compute.scale_s[rank])):
        return Cause.LENGTHS
    return Cause.LENGTHS if evidence.correlations[rank] >= MIN_WORK_CORRELATION else Cause.COMPUTE


def _same_stage(evidence: StragglerEvidence, rank: int) -> Int64:
    """Return the other ranks of a rank's stage."""
    ranks = np.flatnonzero(evidence.peers.stage_of == evidence.peers.stage_of[rank])
    others: Int64 = ranks[ranks != rank]
    return others


def _confidence(evidence: StragglerEvidence, slow: Candidates, rank: int) -> VerdictConfidence:
    """Return HIGH where two signals agree for long enough; with a single peer, the rank's own past must agree too."""
    _, _, num_seen = first_seen(evidence.history.trace(slow.aspect, rank), slow.aspect, evidence.thresholds)
    is_long = num_seen >= (evidence.thresholds.num_steps if slow.aspect is Aspect.COMPUTE else 2)
    if not is_long or not slow.agrees(rank):
        return VerdictConfidence.LOW
    if slow.num_peers[rank] >= 2 or slow.aspect is not Aspect.COMPUTE:
        return VerdictConfidence.HIGH
    return VerdictConfidence.HIGH if evidence.has_risen_alone(rank) else VerdictConfidence.LOW


def _finding(
    evidence: StragglerEvidence, slow: Candidates, cause: Cause, confidence: VerdictConfidence, ranks: list[int]
) -> Finding:
    worst = ranks[0]
    first_step, num_steps, num_seen = first_seen(
        evidence.history.trace(slow.aspect, worst), slow.aspect, evidence.thresholds
    )
    by_host = greatest_by_host((evidence.roster.host_of(rank), float(slow.score[rank])) for rank in ranks)
    victims = _victims(evidence.window, worst, float(slow.excess_s[worst]))
    shown = evidence.window if slow.aspect is Aspect.COMPUTE else evidence.long_window
    finding = Finding(
        cause=cause,
        confidence=confidence,
        ranks=tuple(ranks),
        hosts=tuple(by_host),
        first_step=first_step,
        last_step=int(evidence.window.steps[-1]),
        num_steps=num_steps,
        num_seen=num_seen,
        excess=float(slow.excess_s[worst] / slow.scale_s[worst]),
        excess_s=float(slow.excess_s[worst]),
        score=float(slow.score[worst]),
        wait_deficit_s=float(slow.deficit_s[worst]),
        num_peers=int(slow.num_peers[worst]),
        victims=tuple(victims[:_MAX_NAMED].tolist()),
        num_victims=len(victims),
        step_s=float(np.median(evidence.window.step_s)),
        gain_s=_gain(evidence, shown, _of_host(evidence, slow, ranks) if cause is Cause.COMPUTE else slow, ranks),
        evidence=(),
        scores=by_host,
        rank_scores=tuple(slow.score[ranks].tolist()),
    )
    was_explained = cause is Cause.COMPUTE and evidence.was_explained(worst)
    host = evidence.roster.host_of(worst) if cause is Cause.DATA else ""
    picture_wait = evidence.picture_wait(host, finding.excess_s) if host else None
    return rank_sentences(finding, slow, evidence.roster, was_explained=was_explained, picture_wait=picture_wait)


def _of_host(evidence: StragglerEvidence, slow: Candidates, ranks: list[int]) -> Candidates:
    """Return the candidates with the excess that the samples do not explain, for ranks that have longer documents."""
    excess_s, window = slow.excess_s.copy(), evidence.window
    for rank in ranks:
        same_stage = _same_stage(evidence, rank)
        rest_s = unexplained_s(window, rank, same_stage)
        if rest_s and work_excess(window, rank, same_stage) >= evidence.thresholds.excess:
            excess_s[rank] = min(excess_s[rank], rest_s)
    return replace(slow, excess_s=excess_s)


def _gain(evidence: StragglerEvidence, window: ComparedSteps, slow: Candidates, ranks: list[int]) -> float:
    """Return how many seconds per step the last rank would finish earlier if `ranks` were as fast as their peers.

    In the stage of the worst rank, the compute of each rank's own passes counts: a slow rank with fewer passes may
    delay no other. If the last rank waits much less than its peers, the result is at most the difference of these
    waits, because overlapped time delays no rank. It is an upper bound, computed without a replay.
    """
    is_in_stage = evidence.peers.stage_of == evidence.peers.stage_of[ranks[0]]
    own = window.own[:, Aspect.COMPUTE].astype(np.float64)
    done = np.where(is_in_stage, window.computed, own)
    longer = slow.excess_s + np.median(done - own, axis=0)
    others = np.ones(len(longer), dtype=bool)
    others[ranks] = False
    named = [rank for rank in ranks if is_in_stage[rank]]
    # the excess of compute is that of the median number of passes: a rank with twice as many gains twice the excess
    part = np.median(window.per_pass, axis=0)[named] if slow.aspect is Aspect.COMPUTE else 1.0
    repaired = longer[named] - slow.excess_s[named] / part
    rest = max(0.0, float(repaired.max()), float(longer[others].max(initial=0.0)))
    longest = named[int(longer[named].argmax())]
    bound = max(0.0, float(longer[longest]) - rest)
    if slow.agrees(longest):
        bound = min(bound, max(0.0, float(slow.deficit_s[longest])))
    return min(bound, float(np.median(window.step_s)))


def _victims(window: ComparedSteps, culprit: int, excess_s: float) -> Int64:
    """Return the ranks that wait longer than the culprit by at least half of its excess, the longest wait first."""
    waits = np.median(window.own[:, Aspect.WAIT], axis=0)
    longer = waits - waits[culprit]
    longer[~window.any_reported] = 0.0
    longer[culprit] = 0.0
    found = np.flatnonzero(longer >= max(_VICTIM * excess_s, 1e-9))
    return found[np.argsort(-longer[found], kind="stable")]


def _rotating(evidence: StragglerEvidence) -> Iterator[Finding]:
    """Yield findings if another rank is slow in each step: by samples of many lengths, or by irregular collections."""
    window, thresholds = evidence.long_window, evidence.thresholds
    scale = float(np.median(window.scale))
    for aspect, cause in ((Aspect.COMPUTE, Cause.LENGTHS), (Aspect.GC, Cause.GC)):
        excess = window.excess[:, aspect].astype(np.float64)
        worst = excess.max(axis=1)
        is_seen = worst >= thresholds.excess * scale
        if worst.mean() < thresholds.excess * scale or is_seen.mean() < 0.25:
            continue
        correlation = 0.0
        if aspect is Aspect.COMPUTE:
            # outliers count: they may be the slowness that is to be explained
            correlation = work_correlation(window, np.arange(evidence.peers.num_ranks), pearson)
            if correlation < MIN_WORK_CORRELATION:
                continue
        culprits, times = np.unique(excess.argmax(axis=1)[is_seen], return_counts=True)
        ranks = culprits[np.argsort(-times, kind="stable")].tolist()
        if times.max() > _MOSTLY_ONE * is_seen.sum():
            continue  # one rank is slow most of the time: the rules for a slow rank apply
        yield Finding(
            cause=cause,
            confidence=VerdictConfidence.LOW if aspect is Aspect.GC else VerdictConfidence.HIGH,
            ranks=tuple(ranks[:_MAX_NAMED]),
            hosts=(),
            first_step=int(window.steps[np.flatnonzero(is_seen)[0]]),
            last_step=int(window.steps[-1]),
            num_steps=len(window.steps),
            num_seen=int(is_seen.sum()),
            excess=float(worst.mean()) / scale,
            excess_s=float(worst.mean()),
            score=0.0,
            wait_deficit_s=0.0,
            num_peers=evidence.peers.num_ranks - 1,
            victims=(),
            num_victims=0,
            step_s=float(np.median(window.step_s)),
            gain_s=float(worst.mean()),
            evidence=(rotating_sentence(cause, len(ranks), float(worst.mean()), scale, correlation),),
        )


def _of_network(evidence: StragglerEvidence) -> Iterator[Finding]:
    windows = evidence.window, evidence.long_window, evidence.past
    found: list[SlowNetwork] = list(slow_groups(*windows, evidence.bytes_of, evidence.roster, evidence.thresholds))
    if not found:
        rest = by_elimination(*windows, evidence.thresholds)
        found = [] if rest is None else [rest]
    window = evidence.window
    scale = float(np.median(window.scale))
    for network in found:
        is_high = network.is_against_peers and network.is_against_past and network.is_host_certain
        yield Finding(
            cause=Cause.NETWORK,
            confidence=VerdictConfidence.HIGH if is_high else VerdictConfidence.LOW,
            ranks=network.ranks[:_MAX_NAMED],
            hosts=network.hosts,
            first_step=network.slow_steps.first_step,
            last_step=int(window.steps[-1]),
            num_steps=network.slow_steps.num_steps,
            num_seen=network.slow_steps.num_seen,
            excess=network.excess_s / scale,
            excess_s=network.excess_s,
            score=0.0,
            wait_deficit_s=0.0,
            num_peers=0,
            victims=(),
            num_victims=len(network.ranks),
            step_s=float(np.median(window.step_s)),
            gain_s=min(network.excess_s, evidence.exposed_s()),
            evidence=network_sentences(network),
        )
