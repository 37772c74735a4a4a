"""State that several ranks hold is written by one of them, and the work is spread over the ranks."""

from __future__ import annotations

import torch

from megatrain.checkpoint.ownership import SavedShard, divide
from megatrain.parallel.boxes import Box
from megatrain.parallel.placement import SOLE_HOLDER, ShardHolders
from megatrain.parallel.sharding import FlatShard


def shard(name: str, size: int, holders: ShardHolders = SOLE_HOLDER) -> SavedShard:
    return SavedShard("master", FlatShard(name, (size,), Box((0,), (size,)), torch.zeros(size), holders))


def names(shards: list[SavedShard]) -> list[str]:
    return [one.shard.name for one in shards]


def test_state_of_one_rank_is_its_own() -> None:
    owned, others = divide([shard("a", 3), shard("b", 4)])
    assert (names(owned), others) == (["a", "b"], [])


def test_copies_divide_by_bytes_and_agree() -> None:
    sizes = {"a": 8, "b": 3, "c": 3, "d": 3, "e": 5}
    by_rank = []
    for index in range(2):
        shards = [shard("mine", 100)] + [
            shard(name, size, ShardHolders(("tp",), index, 2)) for name, size in sizes.items()
        ]
        by_rank.append(divide(shards))
    assert names(by_rank[0][0]) == ["mine", "a", "e"]
    assert names(by_rank[1][0]) == ["mine", "b", "c", "d"]
    for (owned, _), (_, others) in (by_rank, by_rank[::-1]):
        assert names(owned)[1:] == names(others)


def test_groups_are_counted_apart() -> None:
    # The end stages have different norms, and still agree on the embedding.
    first = divide(
        [shard("norm", 9, ShardHolders(("tp",), 0, 2)), shard("word", 4, ShardHolders(("embedding",), 0, 2))]
    )
    last = divide(
        [shard("word", 4, ShardHolders(("embedding",), 1, 2)), shard("other", 9, ShardHolders(("tp",), 0, 2))]
    )
    assert names(first[0]) == ["norm", "word"]
    assert names(last[1]) == ["word"]
