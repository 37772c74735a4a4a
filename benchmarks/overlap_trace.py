"""The ideal time of a step with many exchanges: a replay of the step's own calls.

A traced rank records when it starts and when it awaits each exchange, with overlap on. During the trace each exchange
is completed as soon as it has started, so no compute overlaps an exchange, and the compute between the calls takes as
long as with overlap off.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.overlap_replay import LinkReplay
from megatrain.comm import Pending
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation

MARK = -1
"""Used instead of an exchange's number at the beginning and at the end of the counted steps of a block."""
_GATHERS = (Operation.TP_ALL_GATHER, Operation.PARAMS_ALL_GATHER)
_SCATTERS = (Operation.TP_REDUCE_SCATTER, Operation.GRADS_REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One exchange of a block: the group's ranks, the operation, and the bytes that this rank sends."""

    ranks: tuple[int, ...]
    operation: str
    num_bytes: float


@dataclass(slots=True)
class OverlapTrace:
    """The calls of one rank in a block of steps.

    calls: exchange or MARK, whether it is a wait for the exchange, and the seconds of compute since the previous call.
    """

    exchanges: list[SentMessage] = field(default_factory=list)
    calls: list[tuple[int, bool, float]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> OverlapTrace:
        exchanges = [SentMessage(tuple(one["ranks"]), one["operation"], one["num_bytes"]) for one in found["exchanges"]]
        return cls(exchanges, [tuple(call) for call in found["calls"]])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def traced() -> Iterator[tuple[OverlapTrace, Callable[[], None]]]:
    """Record the exchanges of this rank's groups in the block, and await each at once.

    Yields the trace, and a function that sets a mark.
    """
    trace = OverlapTrace()
    start = Group._start
    since = time.perf_counter()

    def call(number: int, is_wait: bool) -> None:
        nonlocal since
        now = time.perf_counter()
        trace.calls.append((number, is_wait, now - since))
        since = now

    def traced_start(group: Group, operation: Operation, out: Any, sent: Any, *rest: Any, **named: Any) -> Pending:
        nonlocal since
        number = len(trace.exchanges)
        num_bytes = sent_bytes(operation.value, sent.numel() * sent.element_size(), group.size)
        trace.exchanges.append(SentMessage(group.ranks, operation.value, num_bytes))
        call(number, False)
        pending = start(group, operation, out, sent, *rest, **named)
        pending.wait()
        since = time.perf_counter()
        return _Traced(pending, lambda: call(number, True))

    with patch.object(Group, "_start", traced_start):
        yield trace, lambda: call(MARK, False)


class _Traced(Pending):
    """A completed exchange whose waits are recorded."""

    __slots__ = ("_note",)

    def __init__(self, pending: Pending, note: Callable[[], None]) -> None:
        super().__init__(pending.result, None, pending.is_done)
        self._note = note

    def wait(self) -> Any:
        self._note()
        return self.result


def sent_bytes(operation: str, num_bytes: int, size: int) -> float:
    """Return the bytes that a rank sends in an exchange of a group of `size`, with an input of `num_bytes`."""
    part = size - 1 if operation in _GATHERS else (size - 1) / size
    return (1 if operation in _GATHERS + _SCATTERS else 2) * part * num_bytes


def sent_by_calls(trace: OverlapTrace) -> float:
    """Return the bytes that a rank sends in the block."""
    return sum(exchange.num_bytes for exchange in trace.exchanges)


def ideal_of_calls(traces: Sequence[Sequence[OverlapTrace]], rate: float, latency_s: float = 0.0) -> float:
    """Return the seconds of a block between its marks.

    traces: by rank, its blocks. rate: bytes a second that a rank sends. latency_s: for which an exchange occupies the
    link, whatever its bytes.
    """
    replay = LinkReplay()
    marks = np.array([_add_rank(replay, rank, blocks, rate, latency_s) for rank, blocks in enumerate(traces)])
    begin, end = replay.ends()[marks].max(axis=0)
    return float(end - begin)


def _add_rank(
    replay: LinkReplay, rank: int, blocks: Sequence[OverlapTrace], rate: float, latency_s: float
) -> list[int]:
    """Add a rank's block. Each compute takes the median time over the rank's blocks. Returns the marks."""
    first = blocks[0]
    program = [call[:2] for call in first.calls]
    assert all([call[:2] for call in block.calls] == program for block in blocks), f"the blocks of rank {rank} differ"
    computes = [float(np.median([block.calls[at][2] for block in blocks])) for at in range(len(program))]
    nodes: list[int] = []
    marks: list[int] = []
    num_calls: Counter[tuple[int, ...]] = Counter()
    after: list[int] = []
    for (number, is_wait), seconds in zip(program, computes, strict=True):
        computed = replay.compute(rank, seconds, after)
        after = [nodes[number]] if is_wait else []
        if number == MARK:
            marks.append(computed)
        elif not is_wait:
            sent = first.exchanges[number]
            num_calls[sent.ranks] += 1
            group = (sent.ranks, num_calls[sent.ranks])
            nodes.append(replay.send(rank, sent.ranks, latency_s + sent.num_bytes / rate, [computed], group))
    return marks
