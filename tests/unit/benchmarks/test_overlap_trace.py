"""The best time of a traced step: an exchange overlaps with the compute between its start and the wait for it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.overlap_trace import MARK, OverlapTrace, SentMessage, ideal_of_calls, sent_by_calls, traced
from megatrain.comm import Pending, dry_mesh
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout

RANKS = (0, 1)
PIECE = 100.0
START, WAIT = False, True


def trace_of(operation: Operation, calls: list[tuple[int, bool, float]], rest: float = 0.0) -> OverlapTrace:
    num_exchanges = 1 + max(number for number, _, _ in calls)
    exchanges = [SentMessage(RANKS, operation.value, PIECE) for _ in range(num_exchanges)]
    return OverlapTrace(exchanges, [(MARK, False, 0.0), *calls, (MARK, False, rest)])


def ideal(*traces: OverlapTrace, rate: float = PIECE) -> float:
    """With the given rate, a piece travels for one second."""
    return ideal_of_calls([[trace] for trace in traces], rate)


def test_sequence_chunks_awaited_later_overlap_with_products() -> None:
    # All start first; each is awaited before its product of 1 s.
    calls = [(number, START, 0.0) for number in range(4)]
    calls += [(0, WAIT, 0.0), (1, WAIT, 1.0), (2, WAIT, 1.0), (3, WAIT, 1.0)]
    gathered = trace_of(Operation.TP_ALL_GATHER, calls, rest=1.0)

    assert sent_by_calls(gathered) == 4 * PIECE
    assert ideal(gathered, gathered) == pytest.approx(5.0)  # the first piece, then four products


def test_exchange_awaited_at_once_is_exposed() -> None:
    blocking = trace_of(Operation.DP_ALL_REDUCE, [(0, START, 1.0), (0, WAIT, 0.0), (1, START, 1.0), (1, WAIT, 0.0)])

    assert ideal(blocking, blocking) == pytest.approx(4.0)


def test_an_exchange_begins_when_both_ranks_have_come() -> None:
    early = trace_of(Operation.TP_ALL_GATHER, [(0, START, 0.0), (0, WAIT, 0.0)], rest=1.0)
    late = trace_of(Operation.TP_ALL_GATHER, [(0, START, 3.0), (0, WAIT, 0.0)], rest=1.0)

    assert ideal(early, late) == pytest.approx(5.0)


def test_gradients_of_the_last_layer_are_exposed() -> None:
    # Four layers of 2 s; the gradients of each, of 1 s, are sent when its backward is over.
    calls = [(number, START, 2.0) for number in range(4)] + [(number, WAIT, 0.0) for number in range(4)]
    by_layer = trace_of(Operation.GRADS_REDUCE_SCATTER, calls)
    at_the_end = [(number, START, 8.0 if number == 0 else 0.0) for number in range(4)]
    whole = trace_of(Operation.GRADS_REDUCE_SCATTER, at_the_end + [(number, WAIT, 0.0) for number in range(4)])

    assert ideal(by_layer, by_layer) == pytest.approx(8.0 + 1.0)
    assert ideal(whole, whole) == pytest.approx(8.0 + 4.0)


def test_traced_exchange_has_its_wait_where_the_program_awaits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    result, gradients = torch.zeros(4), torch.zeros(8)
    monkeypatch.setattr("benchmarks.overlap_trace.time.perf_counter", lambda: now)
    monkeypatch.setattr(Group, "_start", lambda *_, **__: Pending(result, lambda: pass_(100.0)))
    with dry_mesh(Layout(dp_size=2), 0) as mesh:
        group = mesh.replicas
    with traced() as (trace, mark):
        mark()
        pass_(1.0)
        pending = group.reduce_scatter(gradients, Operation.GRADS_REDUCE_SCATTER, out=result)
        assert now == 101.0, "it was awaited at once"
        pass_(2.0)
        assert pending.wait() is result
        pass_(4.0)
        mark()

    # The time of the wait is not compute.
    assert trace.calls == [(MARK, False, 0.0), (0, START, 1.0), (0, WAIT, 2.0), (MARK, False, 4.0)]
    # Of 8 numbers a rank sends the half that belongs to the other rank.
    assert trace.exchanges == [SentMessage(RANKS, Operation.GRADS_REDUCE_SCATTER.value, 16.0)]


def test_medians_of_blocks_count_and_their_calls_must_agree() -> None:
    def of(seconds: float) -> OverlapTrace:
        return trace_of(Operation.TP_ALL_GATHER, [(0, START, seconds), (0, WAIT, 0.0)])

    assert ideal_of_calls([[of(1.0), of(2.0), of(9.0)]], PIECE) == pytest.approx(3.0)
    other = trace_of(Operation.TP_ALL_GATHER, [(0, START, 1.0), (0, WAIT, 0.0), (0, WAIT, 0.0)])
    with pytest.raises(AssertionError, match="the blocks of rank 0 differ"):
        ideal_of_calls([[of(1.0), other]], PIECE)


def test_spans_outside_the_marks_do_not_count() -> None:
    # a step of 2 s, whose exchange overlaps with the next step
    step = [(0, START, 2.0), (0, WAIT, 0.0)]
    calls = [*step, (MARK, False, 0.0), (0, WAIT, 0.0), (1, START, 2.0), (1, WAIT, 0.0), (MARK, False, 0.0)]
    trace = OverlapTrace([SentMessage(RANKS, Operation.PARAMS_ALL_GATHER.value, PIECE)] * 2, [*calls, (1, WAIT, 7.0)])

    assert ideal(trace, trace) == pytest.approx(3.0)
