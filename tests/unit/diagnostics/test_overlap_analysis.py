"""Communication overlapped with compute: by hand, and against a count of every nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.black_box.values import RecordFlag, attended_bits
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.explain import explain_step
from megatrain_diagnostics.analysis.overlap import Overlap
from megatrain_diagnostics.analysis.step_windows import read_step_events
from megatrain_diagnostics.commands.overlap_table import overlap_table
from tests.helpers.drawn_spans import Drawing


def drawn_step(end_us: float = 100, layout: Layout | None = None) -> Drawing:
    """Return a step that lasts from 0 to `end_us` on every rank."""
    drawing = Drawing(layout=layout or Layout())
    for rank in range(drawing.layout.world_size):
        drawing.span(Op.STEP, 0, end_us, rank=rank)
        drawing.total(Op.STEP, 0, end_us, rank=rank)
        drawing.total(Op.STEP, end_us, 1, rank=rank, step=2)
    return drawing


def kinds(drawing: Drawing) -> dict[str, Overlap]:
    found = explain_step(read_step_events(drawing.source(), 1, 1, 1), 1)
    return {overlap.operation: overlap for overlap in found.overlaps}


def us(overlap: Overlap) -> tuple[float, float, float, float]:
    """Return total, exposed, overlapped and elsewhere."""
    return overlap.total_ns / 1000, overlap.exposed_ns / 1000, overlap.overlapped_ns / 1000, overlap.elsewhere_ns / 1000


def exchange(drawing: Drawing, operation: Op, start: float, length: float, **more: int) -> None:
    drawing.span(operation, start, length, group=1, **more)


def attended(part: float) -> int:
    return attended_bits(round(1000 * part), 1000)


def test_exchange_is_overlapped_then_exposed() -> None:
    drawing = drawn_step()
    drawing.span(Op.BACKWARD_COMPUTE, 0, 60)
    exchange(drawing, Op.GRADS_REDUCE_SCATTER, 40, 35)

    found = kinds(drawing)

    assert us(found["grads-reduce-scatter"]) == (35, 15, 20, 0)
    # the rank waited until the exchange was over, so its end is known
    assert not found["grads-reduce-scatter"].is_at_most
    assert found["grads-reduce-scatter"].overlapped_percent == pytest.approx(100 * 20 / 35)


def test_end_of_an_exchange_is_certain_only_if_watched() -> None:
    for flags, is_at_most in ((0, True), (RecordFlag.DEVICE_CLOCK, True), (RecordFlag.WATCHED, False)):
        drawing = drawn_step()
        drawing.span(Op.FORWARD_COMPUTE, 10, 80)
        exchange(drawing, Op.PARAMS_ALL_GATHER, 10, 50, flags=int(flags))

        (one,) = kinds(drawing).values()

        assert us(one) == (50, 0, 50, 0)
        assert one.is_at_most is is_at_most, flags
        text = "\n".join(overlap_table("kind", [one]))
        for part in ("<= 0.050 ms", "<= 100.0 %", "<= at most: "):
            assert (part in text) is is_at_most, (flags, text)


def test_exchange_awaited_late_was_overlapped_before() -> None:
    drawing = drawn_step()
    drawing.span(Op.BACKWARD_COMPUTE, 0, 50)
    exchange(drawing, Op.BACKWARD_RECV, 50, 20, collective=1)
    exchange(drawing, Op.GRADS_REDUCE_SCATTER, 45, 30, collective=2)

    found = kinds(drawing)

    assert us(found["backward-recv"]) == (20, 20, 0, 0)
    assert us(found["grads-reduce-scatter"]) == (30, 5, 5, 20)


def test_awaited_exchange_comes_before_the_first_to_end() -> None:
    for flags, expected in ((0, (20, 40)), (attended(1.0), (0, 60))):
        drawing = drawn_step()
        drawing.span(Op.BACKWARD_COMPUTE, 0, 20)
        exchange(drawing, Op.FORWARD_SEND, 20, 20, collective=1)
        exchange(drawing, Op.FORWARD_RECV, 20, 60, collective=2, flags=flags)

        found = kinds(drawing)

        assert (found["forward-send"].exposed_ns / 1000, found["forward-recv"].exposed_ns / 1000) == expected
        assert found["forward-send"].overlapped_ns == 0


def test_awaited_exchanges_in_compute_are_exposed() -> None:
    drawing = drawn_step(layout=Layout(tp_size=2))
    for rank in (0, 1):
        drawing.span(Op.FORWARD_COMPUTE, 0, 90, rank=rank)
        # awaited at once; awaited for half its time; from a recorder that does not record the wait
        exchange(drawing, Op.TP_ALL_GATHER, 10, 10, flags=attended(1.0), rank=rank)
        exchange(drawing, Op.TP_REDUCE_SCATTER, 30, 20, flags=attended(0.5), rank=rank)
        exchange(drawing, Op.TP_ALL_REDUCE, 60, 10, rank=rank)

    found = kinds(drawing)

    assert us(found["tp-all-gather"]) == (20, 20, 0, 0)
    assert us(found["tp-reduce-scatter"]) == (40, 20, 20, 0)
    assert not found["tp-reduce-scatter"].is_at_most
    assert us(found["tp-all-reduce"]) == (20, 20, 0, 0)


def test_only_what_lies_in_the_step_counts() -> None:
    drawing = drawn_step()
    drawing.span(Op.DATA_WAIT, 0, 10)
    drawing.span(Op.OPTIMIZER, 80, 15)
    exchange(drawing, Op.PARAMS_ALL_GATHER, -20, 40, step=0)
    exchange(drawing, Op.PARAMS_ALL_GATHER, 95, 40)

    found = kinds(drawing)

    # of the first 20 us, 10 overlapped with the data; of the second the 5 to the end of the step, not awaited yet
    assert us(found["params-all-gather"]) == (25, 10, 10, 5)
    assert found["params-all-gather"].count == 2


def test_overlap_is_reported_by_stage() -> None:
    drawing = drawn_step(layout=Layout(pp_size=2, dp_size=2))
    for rank in range(4):
        compute = 60 if rank < 2 else 90
        drawing.span(Op.BACKWARD_COMPUTE, 0, compute, rank=rank)
        exchange(drawing, Op.GRADS_REDUCE_SCATTER, 50, 20, rank=rank)

    found = explain_step(read_step_events(drawing.source(), 1, 1, 1), 1)

    assert [us(of_stage[0]) for of_stage in found.overlaps_by_stage] == [(40, 20, 20, 0), (40, 0, 40, 0)]
    assert us(found.overlaps[0]) == (80, 20, 60, 0)
    assert (found.overlaps[0].num_windows, found.overlaps_by_stage[0][0].num_windows) == (4, 2)


WORK = (Op.GC, Op.CHECKPOINT, Op.EVALUATION, Op.DATA_WAIT, Op.FORWARD_COMPUTE, Op.BACKWARD_COMPUTE, Op.OPTIMIZER)
COMMUNICATION = (Op.GRADS_REDUCE_SCATTER, Op.PARAMS_ALL_GATHER, Op.FORWARD_SEND, Op.BACKWARD_RECV)


@given(
    st.lists(
        st.tuples(st.sampled_from((*WORK, *COMMUNICATION)), st.integers(0, 40), st.integers(0, 15)),
        max_size=12,
        unique_by=lambda drawn: drawn[1] + drawn[2],  # of two exchanges that end together, either may count as exposed
    )
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_overlap_agrees_with_a_count_of_every_nanosecond(drawn: list[tuple[Op, int, int]]) -> None:
    drawing = drawn_step(0.045)
    for operation, start, length in drawn:
        drawing.span(operation, start / 1000, length / 1000, group=1 if operation in COMMUNICATION else 0)

    expected: dict[str, list[int]] = {}
    works = [any(one in WORK and start <= now < start + length for one, start, length in drawn) for now in range(45)]
    for now, has_work in enumerate(works):
        running = [(start + length, one) for one, start, length in drawn
                   if one in COMMUNICATION and start <= now < start + length]  # fmt: skip
        gap_end = next((later for later in range(now, 45) if works[later]), 45)
        first = min(running, default=None)
        for end, one in running:
            sums = expected.setdefault(one.value, [0, 0, 0])
            sums[0] += 1
            sums[1] += not has_work and (end, one) == first and end <= gap_end
            sums[2] += has_work
    found = kinds(drawing)

    assert {name: [one.total_ns, one.exposed_ns, one.overlapped_ns] for name, one in found.items()} == expected
