"""Decides which of several ranks with the same state writes it. A pure function: every rank computes the same result.

Placements show which ranks hold the same state: the tp ranks (norms, biases), the ranks that share a key-value head,
the first and the last stage (a tied embedding), or all ranks of a stage (FP8 scales). Only one of them writes it. Each
shard goes to the holder with the fewest bytes to write so far. A rank's slot has all state of the rank, because after a
crash of the workers the rank resumes from its slot alone. The first part of the slot's contents, the shards that the
rank writes, goes into its data file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.parallel.sharding import FlatShard


@dataclass(frozen=True, slots=True, eq=False)
class SavedShard:
    """One box of one kind of state. All ranks that hold it list their shards in the same order."""

    kind: str
    shard: FlatShard


def divide(shards: Sequence[SavedShard]) -> tuple[list[SavedShard], list[SavedShard]]:
    """Return the shards that this rank writes, and those that another holder writes, each in the given order."""
    owned: list[SavedShard] = []
    others: list[SavedShard] = []
    loads: dict[tuple[str, ...], list[int]] = {}
    for shard in shards:
        holders = shard.shard.holders
        load = loads.setdefault(holders.groups, [0] * holders.count)
        owner = load.index(min(load))
        load[owner] += shard.shard.tensor.nbytes
        (owned if owner == holders.index else others).append(shard)
    return owned, others
