"""The time of a step at best where its exchanges are many: the step's own calls, replayed.

A traced rank notes when it starts an exchange and when it waits for one. With overlap off everything is awaited at
once, and again where overlap on would need it: so the calls of off are also the program of on. What lies between them
is computing.
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
from megatrain.contracts.operations import Operation

MARK = -1
"""In place of an exchange's number: where the counted steps of a block begin, and where they end."""
_GATHERS = (Operation.TP_ALL_GATHER, Operation.PARAMS_ALL_GATHER)
_SCATTERS = (Operation.TP_REDUCE_SCATTER, Operation.GRADS_REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Sent:
    """One exchange of a block: the group's ranks, what it is, and the bytes that this rank sends."""

    ranks: tuple[int, ...]
    operation: str
    num_bytes: float


@dataclass(slots=True)
class Trace:
    """The calls of one rank in a block of steps.

    calls: exchange or MARK, whether it is a wait for it, and the seconds of computing since the call before.
    """

    exchanges: list[Sent] = field(default_factory=list)
    calls: list[tuple[int, bool, float]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Trace:
        exchanges = [Sent(tuple(one["ranks"]), one["operation"], one["num_bytes"]) for one in found["exchanges"]]
        return cls(exchanges, [tuple(call) for call in found["calls"]])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def traced() -> Iterator[tuple[Trace, Callable[[], None]]]:
    """Note what this rank's groups exchange in the block. What it yields besides sets a mark."""
    trace = Trace()
    start = Group._start
    since = time.perf_counter()

    def call(number: int, is_wait: bool) -> None:
        nonlocal since
        now = time.perf_counter()
        trace.calls.append((number, is_wait, now - since))
        since = now

    def traced_start(group: Group, operation: Operation, out: Any, sent: Any, *rest: Any, **named: Any) -> Pending:
        number = len(trace.exchanges)
        part = group.size - 1 if operation in _GATHERS else (group.size - 1) / group.size
        num_times = 1 if operation in _GATHERS + _SCATTERS else 2
        trace.exchanges.append(
            Sent(group.ranks, operation.value, num_times * part * sent.numel() * sent.element_size())
        )
        call(number, False)
        pending = start(group, operation, out, sent, *rest, **named)

        def wait() -> None:
            nonlocal since
            pending.wait()
            since = time.perf_counter()

        return _Traced(pending, lambda: call(number, True), wait)

    with patch.object(Group, "_start", traced_start):
        yield trace, lambda: call(MARK, False)


class _Traced(Pending):
    """An exchange under way each of whose waits is noted."""

    __slots__ = ("_before", "_wait")

    def __init__(self, pending: Pending, before: Any, wait: Any) -> None:
        super().__init__(pending.result, None, pending.is_done)
        self._before, self._wait = before, wait

    def wait(self) -> Any:
        self._before()
        self._wait()
        return self.result


def sent_by_calls(trace: Trace) -> float:
    """Return the bytes that a rank sends in the block."""
    return sum(one.num_bytes for one in trace.exchanges)


def ideal_of_calls(traces: Sequence[Sequence[Trace]], rate: float) -> float:
    """Return the seconds of a block between its marks.

    traces: by rank, its blocks with overlap off; rate: bytes a second it sends.
    """
    replay = LinkReplay()
    marks = np.array([_add_rank(replay, rank, blocks, rate) for rank, blocks in enumerate(traces)])
    begin, end = replay.ends()[marks].max(axis=0)
    return float(end - begin)


def _add_rank(replay: LinkReplay, rank: int, blocks: Sequence[Trace], rate: float) -> list[int]:
    """Add a rank's block; what it computes takes the median of its blocks. Returns its marks."""
    first = blocks[0]
    program = [call[:2] for call in first.calls]
    assert all([call[:2] for call in one.calls] == program for one in blocks), f"the blocks of rank {rank} differ"
    computes = [float(np.median([one.calls[at][2] for one in blocks])) for at in range(len(program))]
    needed = _needed_waits(first)
    nodes: list[int] = []
    marks: list[int] = []
    num_calls: Counter[tuple[int, ...]] = Counter()
    after: list[int] = []
    for at, (number, is_wait) in enumerate(program):
        computed = replay.compute(rank, computes[at], after)
        after = [nodes[one] for one in needed.get(at, ())]
        if number == MARK:
            marks.append(computed)
        elif not is_wait:
            sent = first.exchanges[number]
            num_calls[sent.ranks] += 1
            group = (sent.ranks, num_calls[sent.ranks])
            nodes.append(replay.send(rank, sent.ranks, sent.num_bytes / rate, [computed], group))
    return marks


def _needed_waits(trace: Trace) -> dict[int, list[int]]:
    """Return, by the call before which it is awaited with overlap on, too, the exchanges that must have ended.

    Of several waits for an exchange the last one is needed: those before it are what overlap off adds. Those of
    gradients are awaited once only; with overlap on that is before the sums over all ranks at the end of the step.
    """
    last_wait = {number: at for at, (number, is_wait, _) in enumerate(trace.calls) if is_wait}
    found: dict[int, list[int]] = {}
    reduced: list[int] = []
    for at, (number, is_wait, _) in enumerate(trace.calls):
        if number == MARK:
            continue
        operation = trace.exchanges[number].operation
        if operation == Operation.GRADS_REDUCE_SCATTER.value:
            reduced += [] if is_wait else [number]
        elif is_wait and last_wait[number] == at:
            found.setdefault(at, []).append(number)
        elif operation in (Operation.TP_ALL_REDUCE.value, Operation.DP_ALL_REDUCE.value):
            found.setdefault(at, []).extend(reduced)
            reduced = []
    assert not reduced, "gradients are summed and nothing comes after it"
    return found
