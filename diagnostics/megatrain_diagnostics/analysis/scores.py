"""The straggler score: one number per rank and per host, the same on the page, in metrics, verdicts and commands.

A rank's score is how far its own compute is above its peers over the newest compared steps, in spreads (`candidates`).
For a rank that is slow by its data or its garbage collection, it is the score of that finding where that is greater. A
host's score is the greatest of its ranks; where a finding names the host, the greatest of the named ranks. No score is
below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatrain_diagnostics.analysis.candidates import Candidates
from megatrain_diagnostics.analysis.findings import Finding


def rank_scores(compute: Candidates, findings: Sequence[Finding]) -> tuple[float, ...]:
    """Return the score of each rank, by rank."""
    scores = np.nan_to_num(np.maximum(compute.score, 0.0), posinf=0.0)
    for one in findings:
        for rank, score in zip(one.ranks, one.rank_scores, strict=False):  # ranks of a slow stage have no score
            scores[rank] = max(scores[rank], score)
    return tuple(scores.tolist())


def host_scores(
    scores: Sequence[float], findings: Sequence[Finding], host_of: Callable[[int], str]
) -> dict[str, float]:
    """Return the score of each host. `host_of` returns "" for a rank whose host is not known."""
    found: dict[str, float] = {}
    for rank, score in enumerate(scores):
        host = host_of(rank)
        if host:
            found[host] = max(score, found.get(host, 0.0))
    named: dict[str, float] = {}
    for one in findings:
        for host, score in one.scores.items():
            named[host] = max(score, named.get(host, 0.0))
    return {**found, **named}
