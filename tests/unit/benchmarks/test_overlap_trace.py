"""The best time of a traced step: an exchange that "off" awaits at once and "on" later overlaps with the computation in
between."""

from __future__ import annotations

import pytest

from benchmarks.overlap_trace import MARK, Sent, Trace, ideal_of_calls, sent_by_calls
from megatrain.contracts.operations import Operation

RANKS = (0, 1)
PIECE = 100.0
START, WAIT = False, True


def trace_of(operation: Operation, calls: list[tuple[int, bool, float]], rest: float = 0.0) -> Trace:
    num_exchanges = 1 + max(number for number, _, _ in calls)
    exchanges = [Sent(RANKS, operation.value, PIECE) for _ in range(num_exchanges)]
    return Trace(exchanges, [(MARK, False, 0.0), *calls, (MARK, False, rest)])


def ideal(*traces: Trace, rate: float = PIECE) -> float:
    """With the rate as it is, a piece travels for one second."""
    return ideal_of_calls([[one] for one in traces], rate)


def test_pieces_that_are_awaited_later_travel_beneath_products() -> None:
    # all start first; each is awaited at once, and again before its product of 1 s
    calls = [(number, kind, 0.0) for number in range(4) for kind in (START, WAIT)]
    calls += [(0, WAIT, 0.0), (1, WAIT, 1.0), (2, WAIT, 1.0), (3, WAIT, 1.0)]
    gathered = trace_of(Operation.TP_ALL_GATHER, calls, rest=1.0)

    assert sent_by_calls(gathered) == 4 * PIECE
    assert ideal(gathered, gathered) == pytest.approx(5.0)  # the first piece, then four products


def test_what_is_awaited_at_once_only_is_exposed() -> None:
    blocking = trace_of(Operation.DP_ALL_REDUCE, [(0, START, 1.0), (0, WAIT, 0.0), (1, START, 1.0), (1, WAIT, 0.0)])

    assert ideal(blocking, blocking) == pytest.approx(4.0)


def test_an_exchange_begins_when_both_ranks_have_come() -> None:
    early = trace_of(Operation.TP_ALL_GATHER, [(0, START, 0.0), (0, WAIT, 0.0)], rest=1.0)
    late = trace_of(Operation.TP_ALL_GATHER, [(0, START, 3.0), (0, WAIT, 0.0)], rest=1.0)

    assert ideal(early, late) == pytest.approx(5.0)


def test_gradients_are_awaited_before_the_sums_at_the_end() -> None:
    trace = Trace(
        [
            Sent(RANKS, Operation.GRADS_REDUCE_SCATTER.value, PIECE),
            Sent(RANKS, Operation.GRADS_REDUCE_SCATTER.value, PIECE),
            Sent(RANKS, Operation.TP_ALL_REDUCE.value, 0.0),
        ],
        [
            (MARK, False, 0.0),
            *[(0, START, 1.0), (0, WAIT, 0.0), (1, START, 2.0), (1, WAIT, 0.0), (2, START, 0.5), (2, WAIT, 0.0)],
            (MARK, False, 0.0),
        ],
    )

    # 3 s of backward with the first exchange beneath, 0.5 s with a part of the second, and the rest of that
    assert ideal(trace, trace) == pytest.approx(4.0)


def test_medians_of_blocks_count_and_their_calls_must_agree() -> None:
    def of(seconds: float) -> Trace:
        return trace_of(Operation.TP_ALL_GATHER, [(0, START, seconds), (0, WAIT, 0.0)])

    assert ideal_of_calls([[of(1.0), of(2.0), of(9.0)]], PIECE) == pytest.approx(3.0)
    other = trace_of(Operation.TP_ALL_GATHER, [(0, START, 1.0), (0, WAIT, 0.0), (0, WAIT, 0.0)])
    with pytest.raises(AssertionError, match="the blocks of rank 0 differ"):
        ideal_of_calls([[of(1.0), other]], PIECE)


def test_what_is_before_the_first_mark_and_after_the_last_does_not_count() -> None:
    # a step of 2 s, whose exchange travels beneath the next one
    step = [(0, START, 2.0), (0, WAIT, 0.0)]
    calls = [*step, (MARK, False, 0.0), (0, WAIT, 0.0), (1, START, 2.0), (1, WAIT, 0.0), (MARK, False, 0.0)]
    trace = Trace([Sent(RANKS, Operation.PARAMS_ALL_GATHER.value, PIECE)] * 2, [*calls, (1, WAIT, 7.0)])

    assert ideal(trace, trace) == pytest.approx(3.0)
