"""The state of the sharded optimizer: fp32 master weights under bf16 parameters, clean padding, and shards for
saving."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from megatrain.parallel.placement import ShardHolders
from tests.helpers.example_optimizer import HIDDEN, SHAPES, build_rank, draw, whole_state
from tests.helpers.single_rank_buckets import give_holders


def test_tiny_updates_accumulate_under_bf16() -> None:
    """Each update is far below bf16's resolution at 1; the sum of a hundred updates must be visible."""
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    rank = build_rank(dtype=torch.bfloat16, weights=ones, weight_decay=0.0)
    for _ in range(100):
        rank.set_gradients(ones)
        rank.optimizer.step(1e-4, 1.0)

    for name, master in whole_state([rank]).items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, torch.full(SHAPES[name], 0.99), rtol=0, atol=1e-5)
    for bucket in rank.chunk.buckets:
        for parameter in bucket.parameters:
            assert parameter.parameter.dtype == torch.bfloat16
            assert (parameter.parameter == torch.tensor(0.99).bfloat16()).all()
            assert (parameter.parameter != 1).all()


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd"])
def test_parameters_are_the_masters_rounded(name: str) -> None:
    rank = build_rank(dtype=torch.bfloat16, name=name)
    for step in range(3):
        rank.set_gradients(draw(step))
        rank.optimizer.step(0.01, 1.0)
    masters = whole_state([rank])

    for bucket in rank.chunk.buckets:
        for parameter in bucket.parameters:
            assert torch.equal(parameter.parameter.detach(), masters[parameter.name].bfloat16())
    assert all(state.has_own_master for _, state in rank.optimizer.states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_needs_no_second_copy(dtype: torch.dtype) -> None:
    rank = build_rank(2, 1, dtype=dtype)

    for _, state in rank.optimizer.states:
        assert not state.has_own_master
        assert state.master.untyped_storage().data_ptr() == state.bucket.values.untyped_storage().data_ptr()
        assert state.master.data_ptr() == state.bucket.values[state.bucket.shard].data_ptr()


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_padding_of_the_shards_stays_zero(name: str, dtype: torch.dtype) -> None:
    rank = build_rank(dtype=dtype, name=name, weight_decay=0.3)
    for step in range(3):
        rank.set_gradients(draw(step))
        rank.optimizer.step(0.1, 0.5)

    num_padding = 0
    for chunk, state in rank.optimizer.states:
        used = max((segment.stop for segment in state.bucket.segments()), default=0)
        num_padding += state.bucket.shard_numel - used
        assert not state.bucket.values[state.bucket.shard][used:].any()
        assert not chunk.gradient_shard(state.bucket)[used:].any()
        for tensor in state.tensors().values():
            assert not tensor[used:].any()
            assert torch.isfinite(tensor).all()
    assert num_padding > 0


@pytest.mark.parametrize(
    ("options", "of_hidden", "of_others"),
    [
        ({"name": "adamw"}, {"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq"}),
        ({"name": "muon"}, {"exp_avg"}, {"exp_avg", "exp_avg_sq"}),
        ({"name": "sgd"}, {"momentum"}, {"momentum"}),
        ({"name": "sgd", "ema_decay": 0.75}, {"momentum", "ema"}, {"momentum", "ema"}),
    ],
)
def test_each_rule_keeps_its_kinds_of_state(options: dict[str, Any], of_hidden: set[str], of_others: set[str]) -> None:
    kinds: dict[str, set[str]] = defaultdict(set)
    for kind, shard, _ in build_rank(**options).optimizer.flat_shards():
        kinds[shard.name].add(kind)

    assert kinds == {name: {"master"} | (of_hidden if name in HIDDEN else of_others) for name in SHAPES}


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_flat_shards_are_views_of_all_state(dp_size: int) -> None:
    ranks = [build_rank(dp_size, rank, dtype=torch.bfloat16) for rank in range(dp_size)]
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for rank in ranks:
            for found, shard, is_saved in rank.optimizer.flat_shards():
                assert is_saved
                assert shard.tensor.shape == shard.box.sizes
                assert shard.global_shape == SHAPES[shard.name]
                if found == kind:
                    shard.tensor.fill_(7.0)
        assert all((one == 7).all() for one in whole_state(ranks, kind).values())
        for rank in ranks:
            for _, state in rank.optimizer.states:
                used = max((segment.stop for segment in state.bucket.segments()), default=0)
                assert (state.tensors()[kind][:used] == 7).all()
                assert not state.tensors()[kind][used:].any()


def test_squared_norm_of_the_gradients_is_the_sum_over_ranks() -> None:
    gradients = draw(3)
    expected = sum(gradient.square().sum().item() for gradient in gradients.values())
    for dp_size in (1, 2, 3):
        ranks = [build_rank(dp_size, rank) for rank in range(dp_size)]
        for rank in ranks:
            rank.set_gradients(gradients)
        parts = [rank.optimizer.gradient_square_sum() for rank in ranks]

        assert all(part.dtype == torch.float64 for part in parts)
        assert sum(part.item() for part in parts) == pytest.approx(expected, rel=1e-12)


def test_the_norm_is_squared_in_fp64() -> None:
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    gradients["blocks.0.mlp_bias"][3] = 4097.0
    rank = build_rank(dtype=torch.float32)
    rank.set_gradients(gradients)

    assert rank.optimizer.gradient_square_sum().item() == 4097**2, "2**24 and more has no odd numbers in fp32"


def test_only_infinities_of_replicas_count_in_the_norm() -> None:
    rank = build_rank()
    rank.set_gradients(draw(3))
    for bucket in rank.chunk.buckets:
        give_holders(bucket, ShardHolders(("tp",), index=1, count=2))
    assert rank.optimizer.gradient_square_sum().item() == 0.0

    for bad in (math.nan, math.inf):
        rank.chunk.gradient_shard(rank.chunk.buckets[0])[3] = bad
        assert not math.isfinite(rank.optimizer.gradient_square_sum().item())


def test_changed_shards_are_gathered_before_use() -> None:
    rank = build_rank()
    calls: list[int] = []
    rank.chunk.start_gather()
    for bucket in rank.chunk.buckets:
        bucket.replicas = _NotingGroup(bucket.replicas.rank, calls)  # type: ignore[assignment]
    rank.chunk.finish_gather()
    assert not calls
    rank.set_gradients(draw(3))
    rank.optimizer.step(0.1, 1.0)
    with pytest.raises(RuntimeError, match="updated and not gathered since: the schedule has no GATHER"):
        rank.chunk.await_parameters()
    rank.chunk.start_gather()
    rank.chunk.await_parameters()

    assert calls == [bucket.shard_numel for bucket in reversed(rank.chunk.buckets)]


class _NotingGroup:
    """A group of one that records the gathers."""

    size = 1

    def __init__(self, rank: int, calls: list[int]) -> None:
        self.rank = rank
        self.calls = calls

    def all_gather(self, x: torch.Tensor, operation: object, *, out: torch.Tensor, chunk: int) -> _NotingGroup:
        self.calls.append(x.numel())
        return self

    def wait(self) -> None:
        pass
