"""Exchanges of a branch in chunks: which exchange overlaps with which product, the order of rows, and live tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.comm.sequence_chunks import (
    RowGathering,
    SequenceChunks,
    in_chunk_order,
    in_sequence_order,
)
from megatrain.config.model import ModelConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain.model import TokenContext
from megatrain.model.block import ResidualBranch
from megatrain.ops.attention import AttentionPattern
from megatrain.ops.normalization import ResidualStream
from megatrain.parallel.recompute import SelectiveRecompute
from megatrain.parallel.sequence_chunks import ChunkedSublayers
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from tests.helpers.single_rank import simulated_group

TP, K, LOCAL_ROWS, B, H = 2, 3, 6, 2, 8
S = TP * LOCAL_ROWS
GATHER, SCATTER = Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER


class Log(TorchDispatchMode):
    """The started and awaited exchanges and the products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.lines.append("product")
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class LoggedGroup:
    """A group whose other ranks contribute the same as this rank."""

    name, size, rank, ranks = "tp", TP, 0, tuple(range(TP))

    def __init__(self, log: Log) -> None:
        self.log = log
        self.num_started = 0

    def all_gather(self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int = -1) -> LoggedExchange:
        assert operation is GATHER
        assert x.is_contiguous()
        assert out.is_contiguous()
        return LoggedExchange(self, "gather", lambda: out.copy_(x.repeat(TP, *[1] * (x.dim() - 1))))

    def reduce_scatter(self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int = -1) -> LoggedExchange:
        assert operation is SCATTER
        assert x.is_contiguous()
        assert out.is_contiguous()
        return LoggedExchange(self, "scatter", lambda: out.copy_(TP * x.chunk(TP)[0]))


class LoggedExchange:
    """Its result exists when it was awaited, and not before."""

    def __init__(self, group: LoggedGroup, kind: str, finish: Any) -> None:
        self._what = f"{kind} {group.num_started}"
        self._log, self._finish = group.log, finish
        group.num_started += 1
        self._log.lines.append(f"start {self._what}")

    def wait(self) -> Tensor:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._log.lines.append(f"wait {self._what}")
            self.result = finish()
        return self.result


def branch_of(
    *, attention: bool, mlp: bool, keeps_rows: bool = False, has_overlap: bool = True
) -> tuple[ResidualBranch, Log]:
    config = ModelConfig(
        vocab_size=8, seq_len=S, hidden_size=H, num_layers=1, num_heads=2, ffn_size=12, mlp="swiglu", norm="rmsnorm"
    )
    log = Log()
    torch.manual_seed(0)
    branch = ResidualBranch(config, attention=attention, mlp=mlp, dropout_seed=0, site="branch").double()
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    chunks = SequenceChunks(LoggedGroup(log), K, has_overlap)
    branch.sublayers = ChunkedSublayers(chunks, SelectiveRecompute(), keeps_rows=keeps_rows)
    return branch, log


def run(branch: ResidualBranch, log: Log) -> tuple[Tensor, list[str], list[str]]:
    """Return the output and the events of forward and of backward."""
    x = torch.randn(LOCAL_ROWS, B, H, dtype=torch.float64, requires_grad=True)
    with log:
        stream = branch(ResidualStream(x), TokenContext(torch.arange(B), S), AttentionPattern(S), None)
        forward = log.take()
        stream.total().sum().backward()
    return stream.total(), forward, log.take()


def test_products_overlap_with_the_collectives() -> None:
    _, forward, backward = run(*branch_of(attention=False, mlp=True))

    assert forward == [
        "start gather 0", "start gather 1", "start gather 2",
        "wait gather 0", "product", "wait gather 1", "product", "wait gather 2", "product",
        "product", "start scatter 3", "product", "start scatter 4", "product", "start scatter 5",
        "wait scatter 3", "wait scatter 4", "wait scatter 5",
    ]  # fmt: skip
    assert backward == [
        "start gather 6", "start gather 7", "start gather 8",
        "start gather 9", "start gather 10", "start gather 11",  # the branch's input again
        "wait gather 6", "product", "wait gather 7", "product", "wait gather 8", "product",
        "product",  # down's weight gradient: one, over all rows
        "product", "start scatter 12", "product", "start scatter 13", "product", "start scatter 14",
        "wait gather 9", "wait gather 10", "wait gather 11",
        "product",  # up's
        "wait scatter 12", "wait scatter 13", "wait scatter 14",
    ]  # fmt: skip


def test_without_overlap_the_same_exchanges_are_awaited_at_once() -> None:
    on, off = (run(*branch_of(attention=False, mlp=True, has_overlap=overlap)) for overlap in (True, False))

    for with_overlap, without in zip(on[1:], off[1:], strict=True):
        assert [line for line in without if "wait" not in line] == [line for line in with_overlap if "wait" not in line]
        for line, after in zip(without, [*without[1:], ""], strict=True):
            if line.startswith("start"):
                assert after == line.replace("start", "wait")


@pytest.mark.parametrize(("attention", "mlp"), [(True, False), (True, True)])
def test_chunked_attention_overlaps_with_its_exchanges(attention: bool, mlp: bool) -> None:
    _, forward, backward = run(*branch_of(attention=attention, mlp=mlp))
    num_products = attention + mlp

    for lines in (forward, backward):
        assert CountedExchanges(lines).gathers == (K if lines is forward else 2 * K)
        assert CountedExchanges(lines).scatters == K
    products = [line for line in forward if line == "product"]
    assert len(products) == 2 * K * num_products
    # All products of a chunk are between the start of the next chunk's exchange and its end.
    first = forward[forward.index("start gather 2") : forward.index("wait gather 1") + 1]
    assert first == ["start gather 2", "wait gather 0", *["product"] * num_products, "wait gather 1"]
    last = forward[forward.index("start scatter 3") : forward.index("start scatter 4") + 1]
    assert last == ["start scatter 3", *["product"] * num_products, "start scatter 4"]
    # The second gather of the input overlaps with all of attention's products.
    started, awaited = (backward.index(f"{what} gather {3 * K}") for what in ("start", "wait"))
    assert CountedExchanges(backward[started:awaited]).products >= num_products * (1 + K + 1)


class CountedExchanges:
    """The number of lines of each kind."""

    def __init__(self, lines: list[str]) -> None:
        self.gathers = sum(line.startswith("start gather") for line in lines)
        self.scatters = sum(line.startswith("start scatter") for line in lines)
        self.products = lines.count("product")


def test_rows_that_are_kept_are_not_gathered_again() -> None:
    _, _, again = run(*branch_of(attention=True, mlp=True))
    _, _, kept = run(*branch_of(attention=True, mlp=True, keeps_rows=True))

    assert CountedExchanges(again).gathers == 2 * K
    assert CountedExchanges(kept).gathers == K
    assert CountedExchanges(again).products == CountedExchanges(kept).products


def test_gathered_rows_are_in_chunk_order() -> None:
    log = Log()
    own = torch.arange(LOCAL_ROWS)[:, None]
    chunks = SequenceChunks(LoggedGroup(log), K, has_overlap=True)
    gathering = RowGathering(own, chunks)
    chunk_rows = [gathered.flatten().tolist() for gathered in gathering.gathered_chunks()]

    assert chunk_rows == [[0, 1, 0, 1], [2, 3, 2, 3], [4, 5, 4, 5]]
    assert gathering.rows.flatten().tolist() == [row for rows in chunk_rows for row in rows]


def test_chunk_and_sequence_order_are_inverse() -> None:
    chunks = SequenceChunks(simulated_group("tp", TP, 1), K, has_overlap=True)
    rows = torch.arange(S)[:, None].expand(S, 2)
    shuffled = in_chunk_order(rows, chunks)

    # rank 0 has rows 0 to 5, rank 1 rows 6 to 11; chunks of two
    assert shuffled[:, 1].tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert torch.equal(in_sequence_order(shuffled, chunks), rows)


def test_rows_that_are_no_equal_chunks_are_refused() -> None:
    chunks = SequenceChunks(simulated_group("tp", TP, 0), 4, has_overlap=True)

    with pytest.raises(ValueError, match=r"6 rows .* parallel\.num_sequence_chunks=4 equal chunks"):
        RowGathering(torch.zeros(6, 1), chunks)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Cycles are not collected: freed tensors are freed because nothing refers to them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow(kept=["True-True"])
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("keeps_rows", [False, True])
@pytest.mark.parametrize("has_backward", [False, True])
def test_no_tensor_of_a_microbatch_stays_in_memory(keeps_rows: bool, has_backward: bool) -> None:
    branch, _ = branch_of(attention=True, mlp=True, keeps_rows=keeps_rows)
    pattern, context = AttentionPattern(S), TokenContext(torch.arange(B), S)
    x = torch.randn(LOCAL_ROWS, B, H, dtype=torch.float64, requires_grad=True)
    with PeakTensorBytes().include(branch, x) as memory:
        before = memory.live_bytes
        total = branch(ResidualStream(x), context, pattern, None).total()
        in_between = memory.live_bytes
        if has_backward:
            total.sum().backward()
            branch.zero_grad()
            x.grad = None
        del total

        assert in_between > before
        assert memory.live_bytes == before
