"""Which of several ranks with the same state writes it. Pure; every rank decides alike without asking.

State that several ranks hold alike, as their placements say, is written once: by one of the tp ranks (norms, biases),
of those that share a key-value head, of the two ends of a pipeline (a tied embedding), of a stage (scales of FP8). The
copies take turns by bytes, so that none of them writes it all. A rank's memory image has all of its state, because
after a crash of the workers alone it goes on from there; its file has the first part, what it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.parallel.sharding import FlatShard


@dataclass(frozen=True, slots=True, eq=False)
class SavedShard:
    """One box of one kind of state. All ranks that hold copies list them in the same order."""

    kind: str
    shard: FlatShard


def divide(shards: Sequence[SavedShard]) -> tuple[list[SavedShard], list[SavedShard]]:
    """Return the shards that this rank writes, and those that a copy writes, in the order given."""
    owned: list[SavedShard] = []
    others: list[SavedShard] = []
    loads: dict[str, list[int]] = {}
    for one in shards:
        copies = one.shard.copies
        load = loads.setdefault(copies.group, [0] * copies.count)
        owner = load.index(min(load))
        load[owner] += one.shard.tensor.nbytes
        (owned if owner == copies.index else others).append(one)
    return owned, others
