"""Finds stages of a pipeline whose ranks compute longer than those of the others: no single rank is the cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.candidates import MIN_PART_STEADY
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.sentences import stage_sentences
from megatrain_diagnostics.analysis.straggler_evidence import StragglerEvidence


def slow_stages(evidence: StragglerEvidence, known: set[int]) -> Iterator[Finding]:
    """Yield the stages whose median rank computes longer than that of the other stages.

    A stage is left out if at least half of its ranks are in `known`, which are slow themselves.
    """
    window, peers, thresholds = evidence.window, evidence.peers, evidence.thresholds
    if peers.num_stages < 2:
        return
    of_steps, has_reported = window.own[:, Aspect.COMPUTE].astype(np.float64), window.any_reported
    by_step = np.stack([peers.stage_medians(own, has_reported) for own in of_steps])
    typical = np.median(by_step, axis=0)
    for stage in range(peers.num_stages):
        others = np.delete(by_step, stage, axis=1)
        usual = np.median(others, axis=1)
        if (usual <= 0.0).any():
            continue
        excess_s = float(np.median(by_step[:, stage] - usual))
        scale = float(np.median(usual))
        num_seen = int((by_step[:, stage] - usual >= thresholds.excess * usual).sum())
        ranks = np.flatnonzero(peers.stage_of == stage)
        if excess_s < thresholds.excess * scale or num_seen < MIN_PART_STEADY * len(by_step):
            continue
        if known & set(ranks.tolist()) and len(ranks) <= 2 * len(known & set(ranks.tolist())):
            continue  # only some ranks of the stage are slow
        next_worst = float(np.delete(typical, stage).max())
        finding = Finding(
            cause=Cause.STAGE,
            confidence=VerdictConfidence.HIGH if num_seen >= thresholds.num_steps else VerdictConfidence.LOW,
            ranks=tuple(ranks.tolist()),
            hosts=tuple(sorted(evidence.roster.hosts_of(ranks.tolist()))),
            first_step=int(window.steps[0]),
            last_step=int(window.steps[-1]),
            num_steps=len(by_step),
            num_seen=num_seen,
            excess=excess_s / scale,
            excess_s=excess_s,
            score=0.0,
            wait_deficit_s=0.0,
            num_peers=peers.num_ranks - len(ranks),
            victims=(),
            num_victims=0,
            step_s=float(np.median(window.step_s)),
            gain_s=max(0.0, float(typical[stage]) - next_worst),
            evidence=(),
            stage=stage,
        )
        yield stage_sentences(finding, peers.num_stages, evidence.has_stage_risen(stage))
