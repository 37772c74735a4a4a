"""Which of several ranks with the same state writes it. Pure; every rank decides alike without asking.

State that tp ranks (norms, biases) or the two ends of the pipeline (a tied embedding) hold alike is written once. The
copies take turns by bytes, so that none of them writes it all. A rank's memory image has all of its state, because
after a crash of the workers alone it goes on from there; its file has the first part, what it owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.parallel.sharding import FlatShard


@dataclass(frozen=True, slots=True, eq=False)
class SavedShard:
    """One box of one kind of state, and which of its copies this is.

    `axes`: the groups over which there are copies. All copies list their shards in the same order.
    """

    kind: str
    shard: FlatShard
    axes: tuple[str, ...] = ()
    copy_index: int = 0
    num_copies: int = 1


def divide(shards: Sequence[SavedShard]) -> tuple[list[SavedShard], list[SavedShard]]:
    """Return the shards that this rank writes, and those that a copy writes, in the order given."""
    owned: list[SavedShard] = []
    others: list[SavedShard] = []
    loads: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for one in shards:
        load = loads[one.axes] = loads[one.axes] or [0] * one.num_copies
        owner = load.index(min(load))
        load[owner] += one.shard.tensor.nbytes
        (owned if owner == one.copy_index else others).append(one)
    return owned, others
