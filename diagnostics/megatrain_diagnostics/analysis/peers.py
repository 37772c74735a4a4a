"""Compares each rank with its peers, which do the same work.

Peers are the ranks of the same stage (all of them have the same chunks). In a job of few hosts a rank is compared with
peers on OTHER hosts, because a slow host may have half of a stage and would shift the median. With many hosts the
median over all peers is robust. The spread is the median absolute deviation, scaled to a standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.analysis.medians import medians
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Flags, Float64, Int64

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation -> standard deviation of a normal distribution."""
_FEW_HOSTS = 8
"""With more hosts in a stage than this, one host cannot shift the median of all ranks by much."""
_FEW_RANKS = 16
_MIN_ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Some ranks, and the ranks that they are compared with."""

    members: Int64
    references: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Median and spread of the peers of each rank. Shapes: median and spread [k, ranks]; num_peers [ranks]."""

    median: Float64
    spread: Float64
    num_peers: Int64


class Peers:
    """The comparisons of one round."""

    def __init__(self, roster: Roster) -> None:
        self.num_ranks = roster.layout.world_size
        self.stage_of: Int64 = roster.stage_of.astype(np.int64)
        self.num_stages = roster.layout.pp_size
        hosts = [roster.host_of(rank) for rank in range(self.num_ranks)]
        self.comparisons: list[Comparison] = []
        for stage in range(self.num_stages):
            self.comparisons += _comparisons(np.flatnonzero(self.stage_of == stage), hosts)
        all_ranks = np.ones(self.num_ranks, dtype=bool)
        self.num_peers = self.reference(np.zeros((1, self.num_ranks)), all_ranks).num_peers
        """Number of peers of each rank when all ranks report."""

    def reference(self, values: Float64, has_reported: Flags) -> Reference:
        """Return median and spread of the peers of each rank, using only peers that reported.

        A rank without peers is its own reference. Shapes: values [k, ranks], has_reported [ranks].
        """
        median, spread = values.copy(), np.zeros_like(values)
        num_peers = np.zeros(self.num_ranks, dtype=np.int64)
        is_whole = bool(has_reported.all())
        for comparison in self.comparisons:
            others = comparison.references if is_whole else comparison.references[has_reported[comparison.references]]
            if not len(others):
                continue
            found = values[:, others]
            middle = medians(found, axis=1)[:, None]
            median[:, comparison.members] = middle
            spread[:, comparison.members] = medians(np.abs(found - middle), axis=1)[:, None]
            num_peers[comparison.members] = len(others) - (comparison.members is comparison.references)
        return Reference(median, MAD_TO_SIGMA * spread, num_peers)

    def stage_medians(self, values: Float64, has_reported: Flags) -> Float64:
        """Return the median of each stage; 0 if no rank reported. Shapes: values [ranks]; result [stages]."""
        by_stage = np.zeros(self.num_stages)
        for stage in range(self.num_stages):
            found = values[(self.stage_of == stage) & has_reported]
            by_stage[stage] = medians(found, axis=0) if len(found) else 0.0
        return by_stage


def _comparisons(ranks: Int64, hosts: list[str]) -> list[Comparison]:
    """Return the comparisons within one stage."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks.tolist():
        by_host.setdefault(hosts[rank], []).append(rank)
    if len(by_host) > _FEW_HOSTS or (len(by_host) == 1 and len(ranks) > _FEW_RANKS):
        return [Comparison(ranks, ranks)]
    found = []
    for own in by_host.values():
        elsewhere = np.setdiff1d(ranks, own)
        if len(elsewhere) >= _MIN_ELSEWHERE:
            found.append(Comparison(np.array(own, dtype=np.int64), elsewhere))
        elif len(ranks) <= _FEW_RANKS:
            found += [Comparison(np.array([rank], dtype=np.int64), ranks[ranks != rank]) for rank in own]
        else:
            found.append(Comparison(np.array(own, dtype=np.int64), ranks))
    return found
