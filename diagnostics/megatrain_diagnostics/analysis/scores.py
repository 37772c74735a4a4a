"""The straggler score: one number a rank and one a host, the same on the page, in metrics, verdicts and verbs.

Of a rank it is how far its own compute is above its peers over the newest compared steps, in spreads (`candidates`); of
a rank that is found slow by its data or its garbage collection, that of the finding where it is more. Of a host it is
the greatest of its ranks; where a finding names the host, the greatest of the ranks that are named. No score is below
0.
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
        for rank, score in zip(one.ranks, one.rank_scores, strict=False):  # of a stage no rank has one
            scores[rank] = max(scores[rank], score)
    return tuple(scores.tolist())


def host_scores(
    scores: Sequence[float], findings: Sequence[Finding], host_of: Callable[[int], str]
) -> dict[str, float]:
    """Return the score of each host. `host_of`: "" of a rank whose host is not known."""
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
