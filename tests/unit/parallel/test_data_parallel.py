"""Accumulation of gradients in the buckets of a single rank: over micro-batches and steps, with both ZeRO stages."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megatrain.contracts.black_box.operations import Operation
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.placement import ShardHolders
from tests.helpers.single_rank import simulated_group
from tests.helpers.single_rank_buckets import give_holders, held_whole

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two layers; the second one can be left out, so that it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor, is_second_used: bool) -> Tensor:
        y = self.first(x).tanh()
        return (self.second(y) if is_second_used else y).sum()


def build(
    zero_stage: int, dtype: torch.dtype = torch.float64, reduce_dtype: torch.dtype | None = None, overlap: bool = True
) -> tuple[Net, ChunkDataParallel]:
    with torch.device("meta"):
        net = Net()
    logical = [held_whole(name, parameter) for name, parameter in net.named_parameters()]
    gradient_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    options = DataParallelOptions(
        zero_stage=zero_stage,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        reduce_dtype=reduce_dtype or gradient_dtype,
        bucket_size=40,
        has_overlap=overlap,
    )
    chunk = ChunkDataParallel(logical, {"dp": simulated_group("dp", 1, 0)}, options, CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return net, chunk


def inputs(step: int, microbatch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + microbatch)).to(
        dtype
    )


def run_step(net: Net, chunk: ChunkDataParallel, step: int, uses: list[bool]) -> dict[str, Tensor]:
    chunk.start_step()
    for microbatch, is_second_used in enumerate(uses):
        loss = net(inputs(step, microbatch, next(net.parameters()).dtype), is_second_used)
        chunk.before_backward()
        loss.backward()
        chunk.after_backward()
    chunk.reduce()
    chunk.finish_reduce()
    found = {}
    for bucket in chunk.buckets:
        shard = chunk.gradient_shard(bucket)
        used = 0
        for segment in bucket.segments():
            shape = segment.logical.parameter.shape
            found[segment.logical.name] = shard[segment.start : segment.stop].view(shape).clone()
            used = segment.stop
        assert not shard[used:].any(), "the padding has a gradient"
    return found


def plain_step(net: Net, step: int, uses: list[bool]) -> dict[str, Tensor]:
    plain = Net().double()
    plain.load_state_dict({name: one.double() for name, one in net.state_dict().items()})
    for microbatch, is_second_used in enumerate(uses):
        plain(inputs(step, microbatch), is_second_used).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in plain.named_parameters()
    }


STEPS = [[True], [True, True, True], [False, True], [True, False], [False, False], [True]]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_gradients_are_sums_over_the_microbatches_of_the_step(zero_stage: int, overlap: bool) -> None:
    net, chunk = build(zero_stage, overlap=overlap)
    assert len(chunk.buckets) > 1
    for step, uses in enumerate(STEPS):
        found, expected = run_step(net, chunk, step, uses), plain_step(net, step, uses)
        assert found.keys() == expected.keys()
        for name, truth in expected.items():
            torch.testing.assert_close(found[name], truth, rtol=1e-12, atol=1e-12, msg=f"{name} in step {step}")
        assert all(parameter.grad is None for parameter in net.parameters())


def test_zero_stages_give_bitwise_the_same() -> None:
    first, second = build(1), build(2)
    for step, uses in enumerate(STEPS):
        one, two = run_step(*first, step, uses), run_step(*second, step, uses)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_zero_2_keeps_no_whole_gradients_between_microbatches() -> None:
    net, chunk = build(2)
    run_step(net, chunk, 0, [True, True])

    assert all(bucket.gradients is None for bucket in chunk.buckets)


def bf16_gradients_summed(net: Net, num_microbatches: int) -> dict[str, Tensor]:
    """Return the fp64 sum of what plain bf16 gives for each micro-batch of step 0."""
    sums = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in net.named_parameters()}
    for microbatch in range(num_microbatches):
        plain = Net().bfloat16()
        plain.load_state_dict(net.state_dict())
        plain(inputs(0, microbatch, torch.bfloat16), True).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.double()
    return sums


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_bf16_gradients_are_summed_in_fp32(zero_stage: int) -> None:
    net, chunk = build(zero_stage, torch.bfloat16)
    found = run_step(net, chunk, 0, [True] * 64)

    for name, truth in bf16_gradients_summed(net, 64).items():
        assert found[name].dtype == torch.float32
        assert (found[name].double() - truth).norm().item() < 1e-6 * truth.norm().item(), name


def test_unreferenced_chunk_is_freed_with_its_parameters() -> None:
    net, chunk = build(1, torch.float32)
    run_step(net, chunk, 0, [True] * 2)
    remembered = [weakref.ref(chunk.buckets[0]), weakref.ref(next(net.parameters()))]

    del net, chunk
    gc.collect()

    assert [one() for one in remembered] == [None, None]


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_gradients_that_are_not_sent_are_not_rounded(zero_stage: int) -> None:
    found, exact = (
        run_step(*build(zero_stage, torch.bfloat16, reduce_dtype=dtype), 0, [True] * 3)
        for dtype in (torch.bfloat16, torch.float32)
    )

    for name, gradient in exact.items():
        assert torch.equal(found[name], gradient), name


@dataclass(eq=False)
class StartedExchange:
    """An exchange that a group was requested to do, and how often it was awaited."""

    operation: Operation
    result: Tensor
    num_waits: int = 0

    def wait(self) -> Tensor:
        self.num_waits += 1
        return self.result


class NotingGroup:
    """A group of one that records its exchanges, and whether one starts before the last was awaited."""

    size, rank = 1, 0

    def __init__(self, name: str, exchanges: list[StartedExchange]) -> None:
        self.name = name
        self.exchanges = exchanges
        self.has_overlapped = False

    def _note(self, operation: Operation, result: Tensor) -> StartedExchange:
        self.has_overlapped |= any(not exchange.num_waits for exchange in self.exchanges)
        self.exchanges.append(StartedExchange(operation, result))
        return self.exchanges[-1]

    def all_gather(self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int) -> StartedExchange:
        return self._note(operation, out)

    def reduce_scatter(
        self, x: Tensor, operation: Operation, *, out: Tensor | None, chunk: int, sums_in_fp32: bool
    ) -> StartedExchange:
        assert sums_in_fp32
        return self._note(operation, x if out is None else out)

    def all_reduce(self, x: Tensor, operation: Operation) -> StartedExchange:
        return self._note(operation, x)


def noting(chunk: ChunkDataParallel) -> tuple[list[StartedExchange], NotingGroup]:
    """Let all of the chunk's exchanges use a recording group, including sums over tp."""
    exchanges: list[StartedExchange] = []
    group = NotingGroup("tp", exchanges)
    for bucket in chunk.buckets:
        bucket.replicas, bucket.sum_groups = group, (group,)  # type: ignore[assignment]
        give_holders(bucket, ShardHolders(("tp",), 0, 2))
    return exchanges, group


def test_gather_is_started_once_after_a_change() -> None:
    _, chunk = build(1)
    exchanges, _ = noting(chunk)
    chunk.finish_gather()
    assert not exchanges, "nothing changed yet"
    chunk.mark_shards_changed()
    chunk.start_gather()
    chunk.start_gather()
    assert len(exchanges) == len(chunk.buckets)
    assert not any(exchange.num_waits for exchange in exchanges)
    chunk.finish_gather()
    chunk.finish_gather()

    assert len(exchanges) == len(chunk.buckets)
    assert all(exchange.num_waits for exchange in exchanges)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_without_overlap_each_exchange_is_awaited_at_once(zero_stage: int) -> None:
    net, chunk = build(zero_stage, overlap=False)
    exchanges, group = noting(chunk)
    chunk.start_step()
    chunk.before_backward()
    net(inputs(0, 0), True).backward()
    chunk.after_backward()
    chunk.reduce()
    assert [exchange.operation for exchange in exchanges] == [Operation.GRADS_REDUCE_SCATTER] * len(chunk.buckets)
    assert all(exchange.num_waits for exchange in exchanges), "after the reduction"
    group.has_overlapped = False
    chunk.finish_reduce()
    chunk.mark_shards_changed()
    chunk.start_gather()

    assert len(exchanges) == 3 * len(chunk.buckets)
    assert all(exchange.num_waits for exchange in exchanges)
    assert not group.has_overlapped


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_overlapped_exchange_is_awaited_where_its_result_is_used(zero_stage: int) -> None:
    net, chunk = build(zero_stage)
    exchanges, group = noting(chunk)
    chunk.start_step()
    chunk.before_backward()
    net(inputs(0, 0), True).backward()
    chunk.after_backward()
    chunk.reduce()
    assert not any(exchange.num_waits for exchange in exchanges)
    chunk.finish_reduce()

    assert [exchange.operation for exchange in exchanges[len(chunk.buckets) :]] == [Operation.TP_ALL_REDUCE] * len(
        chunk.buckets
    )
    assert all(exchange.num_waits for exchange in exchanges)
    assert group.has_overlapped
