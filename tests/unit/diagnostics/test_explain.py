"""The time of a step by category, exact to the nanosecond: by hand, and against a count of every nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.exchanges import find_exchanges
from megatrain_diagnostics.analysis.explain import NOT_SPLIT, StepExplanation, explain_step, shares
from megatrain_diagnostics.analysis.exposure import CATEGORIES, expose
from megatrain_diagnostics.analysis.step_windows import full_steps, known_steps, read_step_events, step_windows
from tests.helpers.drawn_spans import Drawing, draw_job
from tests.helpers.memory_events import MemoryEvents


def explain(drawing: Drawing, step: int = 1) -> StepExplanation:
    return explain_step(read_step_events(drawing.source(), 1, step, step), step)


def spent_us(found: StepExplanation, rank: int = 0) -> dict[str, float]:
    """Return the time of a rank by category in us, without zeros."""
    return {name: amount / 1000 for name, amount in found.ranks[rank].spent_ns.items() if amount}


def draw_step(drawing: Drawing, end_us: float, rank: int = 0) -> None:
    """Draw a step from 0 to `end_us`, and the beginning of the next."""
    drawing.span(Op.STEP, 0, end_us, rank=rank)
    drawing.total(Op.STEP, 0, end_us, rank=rank)
    drawing.total(Op.STEP, end_us, 1, rank=rank, step=2)


def test_time_of_a_lone_rank_by_category() -> None:
    drawing = Drawing()
    drawing.total(Op.STEP, 0, 95)
    drawing.total(Op.STEP, 200, 95, step=2)
    drawing.span(Op.DATA_WAIT, 0, 5)
    drawing.span(Op.STEP, 5, 90)
    drawing.span(Op.FORWARD_COMPUTE, 6, 30)
    drawing.span(Op.BACKWARD_COMPUTE, 36, 40)
    drawing.span(Op.CLIP, 76, 4)
    drawing.span(Op.OPTIMIZER, 80, 10)
    drawing.span(Op.GC, 100, 20)
    drawing.span(Op.CHECKPOINT, 120, 30)
    drawing.span(Op.EVALUATION, 150, 40)
    drawing.span(Op.FORWARD_COMPUTE, 160, 10)  # of the evaluation

    found = explain(drawing)

    assert found.is_full
    assert found.wall_ns == 200_000
    assert spent_us(found) == {
        "compute": 70, "data": 5, "optimizer": 14, "gc": 20, "checkpoint": 30, "evaluation": 40, "other": 21,
    }  # fmt: skip
    assert sum(found.job.percent.values()) == pytest.approx(100.0, abs=1e-9)


def test_collection_inside_of_compute_is_not_compute() -> None:
    drawing = Drawing()
    draw_step(drawing, 50)
    drawing.span(Op.FORWARD_COMPUTE, 0, 50)
    drawing.span(Op.GC, 10, 7)

    assert spent_us(explain(drawing)) == {"compute": 43, "gc": 7}


def test_overlapped_communication_is_not_exposed() -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    dp = drawing.group("dp", (0, 1))
    for rank in (0, 1):
        draw_step(drawing, 100, rank)
        drawing.span(Op.BACKWARD_COMPUTE, 0, 60, rank=rank)
        # overlapped from 40 to 60, waited for until 75; the gather goes on into the next step
        drawing.span(Op.GRADS_REDUCE_SCATTER, 40, 35, rank=rank, group=dp, collective=1)
        drawing.span(Op.OPTIMIZER, 80, 10, rank=rank)
        drawing.span(Op.PARAMS_ALL_GATHER, 90, 30, rank=rank, group=dp, collective=2)

    assert spent_us(explain(drawing)) == {"compute": 60, "dp-reduce-scatter": 15, "optimizer": 10, "other": 15}


def test_first_open_exchange_to_end_delays_the_rank() -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    dp = drawing.group("dp", (0, 1))
    for rank in (0, 1):
        draw_step(drawing, 100, rank)
        drawing.span(Op.GRADS_REDUCE_SCATTER, 0, 70, rank=rank, group=dp, collective=1)
        drawing.span(Op.PARAMS_ALL_GATHER, 20, 10, rank=rank, group=dp, collective=2)
        drawing.span(Op.FORWARD_COMPUTE, 70, 30, rank=rank)

    assert spent_us(explain(drawing)) == {"compute": 30, "dp-reduce-scatter": 60, "dp-all-gather": 10}


def test_every_exchange_that_a_rank_waits_for_has_a_category() -> None:
    exchanges = [one for one in Op if one.is_collective or one.is_point_to_point]
    for operation in exchanges:
        drawing = Drawing()
        draw_step(drawing, 100)
        drawing.span(operation, 0, 70)
        drawing.span(Op.FORWARD_COMPUTE, 70, 30)
        assert "other" not in spent_us(explain(drawing)), operation
    assert len(exchanges) >= 15


def test_late_neighbor_is_bubble_then_transfer() -> None:
    drawing = Drawing(layout=Layout(pp_size=2))
    link = drawing.group("pp-forward", (0, 1))
    for rank in (0, 1):
        draw_step(drawing, 100, rank)
    drawing.span(Op.FORWARD_COMPUTE, 0, 40, rank=0)
    drawing.span(Op.FORWARD_SEND, 40, 12, rank=0, group=link, collective=1)
    drawing.span(Op.FORWARD_COMPUTE, 52, 48, rank=0)
    drawing.span(Op.FORWARD_RECV, 5, 45, rank=1, group=link, collective=1)
    drawing.span(Op.FORWARD_COMPUTE, 50, 50, rank=1)

    found = explain(drawing)

    assert spent_us(found, 0) == {"compute": 88, "pp": 12}
    assert spent_us(found, 1) == {"compute": 50, "bubble": 35, "pp": 10, "other": 5}
    assert [stage.wall_ns for stage in found.stages] == [100_000, 100_000]


def test_compute_excludes_tensor_parallel_collectives() -> None:
    drawing = Drawing(layout=Layout(tp_size=2))
    tp = drawing.group("tp", (0, 1))
    for rank in (0, 1):
        draw_step(drawing, 100, rank)
        drawing.span(Op.FORWARD_COMPUTE, 0, 50, rank=rank)
        drawing.span(Op.TP_ALL_GATHER, 10, 5, rank=rank, group=tp, collective=1)
        drawing.span(Op.TP_REDUCE_SCATTER, 40, 8, rank=rank, group=tp, collective=2)
        drawing.span(Op.CLIP, 60, 20, rank=rank)
        drawing.span(Op.TP_ALL_REDUCE, 65, 6, rank=rank, group=tp, collective=3)

    assert spent_us(explain(drawing)) == {
        "compute": 37, "tp": 13, "optimizer": 14, "other-communication": 6, "other": 30,
    }  # fmt: skip


def test_last_arrivals_are_listed_with_the_waiting_of_the_others() -> None:
    drawing = Drawing(layout=Layout(dp_size=3))
    dp = drawing.group("dp", (0, 1, 2))
    for rank, compute in enumerate((30, 80, 40)):
        draw_step(drawing, 100, rank)
        drawing.span(Op.BACKWARD_COMPUTE, 0, compute, rank=rank)
        drawing.span(Op.GRADS_REDUCE_SCATTER, compute, 90 - compute, rank=rank, group=dp, collective=1)

    found = explain(drawing)

    (last,) = found.last
    assert (last.rank, last.host, last.num_collectives, last.operation) == (1, "host-0", 1, "grads-reduce-scatter")
    assert last.waited_ns == 50_000 + 40_000
    assert found.ranks[0].waiting_ns == {"dp-reduce-scatter": 50_000}


def test_step_of_sums_alone_is_not_split_further() -> None:
    drawing = Drawing()
    for step, start in ((1, 0), (2, 150)):
        for operation, amount in ((Op.STEP, 90), (Op.DATA_WAIT, 10), (Op.FORWARD_COMPUTE, 30),
                                  (Op.BACKWARD_COMPUTE, 20), (Op.BACKWARD_WEIGHT_COMPUTE, 10), (Op.OPTIMIZER, 5),
                                  (Op.CHECKPOINT, 40)):  # fmt: skip
            drawing.total(operation, start, amount, step=step)

    found = explain(drawing)

    assert not found.is_full
    # of the 150 us to the next step 100 are the step's own; the checkpoint lay in the rest
    assert spent_us(found) == {"data": 10, "compute": 60, "optimizer": 5, "checkpoint": 40, NOT_SPLIT: 35}
    assert sum(found.job.percent.values()) == pytest.approx(100.0, abs=1e-9)
    assert "not recorded span by span" in found.notes[0]


def test_evaluation_in_the_sums_cannot_make_more_than_the_whole() -> None:
    drawing = Drawing()
    for operation, amount in ((Op.STEP, 90), (Op.FORWARD_COMPUTE, 300), (Op.OPTIMIZER, 5)):
        drawing.total(operation, 0, amount)

    assert spent_us(explain(drawing)) == {"compute": 90}


def test_missing_step_and_step_without_a_duration_are_errors() -> None:
    drawing = Drawing()
    draw_step(drawing, 50)
    drawing.span(Op.FORWARD_COMPUTE, 0, 50)

    with pytest.raises(DataError, match="step 7 is not among the events of round 1"):
        explain(drawing, 7)
    assert known_steps(drawing.source(), 1) == "all spans of steps 1; sums of steps 1, 2"
    drawing = Drawing()
    drawing.total(Op.FORWARD_COMPUTE, 0, 50)
    with pytest.raises(DataError, match="step and data-wait are not recorded"):
        explain(drawing)


def test_rank_whose_clock_jumped_an_hour_is_left_out_and_named() -> None:
    drawing = Drawing(layout=Layout(dp_size=3))
    for rank in range(3):
        shift = 7_200e6 if rank == 2 else 0
        drawing.span(Op.STEP, shift, 50, rank=rank)
        drawing.span(Op.FORWARD_COMPUTE, shift, 50, rank=rank)

    found = explain(drawing)

    assert [one.name for one in found.ranks] == ["rank 0", "rank 1"]
    assert found.num_missing == 1
    assert "clock of rank 2 jumped" in found.notes[0]


def test_garbage_is_left_out_and_counted() -> None:
    drawing = Drawing()
    draw_step(drawing, 50)
    drawing.span(Op.FORWARD_COMPUTE, 0, 50)
    drawing.span(Op.FORWARD_COMPUTE, 0, 1, rank=99)
    drawing.span(Op.FORWARD_COMPUTE, 0, 1e12)

    found = explain(drawing)

    assert spent_us(found) == {"compute": 50}
    assert found.notes[0].startswith("left out 2 spans of ranks outside the layout")


def test_contradicting_spans_make_no_exchange() -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    dp = drawing.group("dp", (0, 1))
    for rank, step in ((0, 1), (1, 1)):
        draw_step(drawing, 100, rank)
        drawing.span(Op.GRADS_REDUCE_SCATTER, 10, 5, rank=rank, group=dp, collective=1, step=step + rank)
        drawing.span(Op.GRADS_REDUCE_SCATTER, 20, 5, rank=rank, group=dp, collective=2, step=step)

    events = read_step_events(drawing.source(), 1, 1, 1)
    exchanges = find_exchanges(events.spans, events.roster)

    assert exchanges.num_contradicting == 2
    assert len(exchanges) == 1
    assert exchanges.is_whole.all()

    # a rank twice in an exchange
    drawing = Drawing(layout=Layout(dp_size=2))
    dp = drawing.group("dp", (0, 1))
    for start in (10, 30):
        drawing.span(Op.GRADS_REDUCE_SCATTER, start, 5, group=dp, collective=1)

    events = read_step_events(drawing.source(), 1, 1, 1)
    exchanges = find_exchanges(events.spans, events.roster)

    assert (len(exchanges), exchanges.num_contradicting) == (0, 2)
    assert exchanges.arrived_ns(events.spans).tolist() == events.spans.start_ns.tolist()


def test_an_unknown_group_is_reported() -> None:
    drawing = Drawing(layout=Layout(pp_size=2))
    draw_step(drawing, 50)
    drawing.span(Op.FORWARD_RECV, 0, 20, group=9, collective=1)
    drawing.span(Op.FORWARD_COMPUTE, 20, 30)

    found = explain(drawing)

    assert spent_us(found) == {"compute": 30, "pp": 20}
    assert found.notes == ("1 span whose group is not known: which rank waited there is not known",)


LAYERS = [
    ("gc", (Op.GC,)), ("checkpoint", (Op.CHECKPOINT,)), ("evaluation", (Op.EVALUATION,)), ("data", (Op.DATA_WAIT,)),
    ("compute", (Op.FORWARD_COMPUTE, Op.BACKWARD_COMPUTE, Op.BACKWARD_WEIGHT_COMPUTE)),
    ("optimizer", (Op.CLIP, Op.OPTIMIZER)),
]  # fmt: skip
DRAWN = [operation for _, operations in LAYERS for operation in operations] + [
    *(Op.GRADS_REDUCE_SCATTER, Op.PARAMS_ALL_GATHER, Op.DP_ALL_REDUCE, Op.FORWARD_SEND, Op.BACKWARD_RECV),
]
KIND = {Op.GRADS_REDUCE_SCATTER: "dp-reduce-scatter", Op.PARAMS_ALL_GATHER: "dp-all-gather",
        Op.DP_ALL_REDUCE: "other-communication", Op.FORWARD_SEND: "pp", Op.BACKWARD_RECV: "pp"}  # fmt: skip


def count_every_ns(spans: list[tuple[Op, int, int]], length: int) -> dict[str, int]:
    """Return the same by a count of each nanosecond: without nested spans and peers."""
    owners: list[str] = []
    for now in range(length):
        running = {operation for operation, start, end in spans if start <= now < end}
        owners.append(next((name for name, its in LAYERS if running & set(its)), "other"))
    found: dict[str, int] = {}
    for now, owner in enumerate(owners):
        name = owner
        if owner == "other":
            gap_end = next((later for later in range(now, length) if owners[later] != "other"), length)
            waited = [(end, operation) for operation, start, end in spans
                      if operation in KIND and start <= now < end]  # fmt: skip
            if waited and min(waited)[0] <= gap_end:
                ends = min(end for end, _ in waited)
                name = next(KIND[operation] for end, operation in waited if end == ends)
        found[name] = found.get(name, 0) + 1
    return found


@given(
    st.lists(
        st.tuples(st.sampled_from(DRAWN), st.integers(0, 40), st.integers(0, 15)),
        max_size=12,
        unique_by=lambda drawn: drawn[1] + drawn[2],  # of two exchanges that end together, either may get the time
    )
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_time_agrees_with_a_count_of_every_nanosecond(drawn: list[tuple[Op, int, int]]) -> None:
    # an all-reduce inside of clip is counted by another rule, which is tested by hand
    clips = [(start, start + length) for operation, start, length in drawn if operation in (Op.CLIP, Op.OPTIMIZER)]
    drawn = [
        (operation, start, length)
        for operation, start, length in drawn
        if operation is not Op.DP_ALL_REDUCE or all(start >= end or start + length <= begin for begin, end in clips)
    ]
    drawing = Drawing()
    draw_step(drawing, 0.045)
    for operation, start, length in drawn:
        drawing.span(operation, start / 1000, length / 1000)

    found = explain(drawing)

    assert {name: round(amount * 1000) for name, amount in spent_us(found).items()} == count_every_ns(
        [(operation, start, start + length) for operation, start, length in drawn], 45
    )


def test_whole_job_adds_up_and_windows_fit_together() -> None:
    drawing = draw_job(Layout(tp_size=2, pp_size=4, dp_size=2), range(10, 13), 4)
    events = read_step_events(drawing.source(), 1, 10, 12)
    windows = step_windows(events.spans, events.totals, 10, 12)
    exposure = expose(events.spans, find_exchanges(events.spans, events.roster), windows)

    assert full_steps(events.spans).tolist() == [10, 11, 12]
    assert len(windows) == 16 * 3
    np.testing.assert_array_equal(exposure.spent_ns.sum(axis=1), windows.end_ns - windows.begin_ns)
    assert (exposure.exposed_ns <= np.maximum(events.spans.duration_ns, 0)).all()
    assert (exposure.span_waiting_ns <= exposure.exposed_ns).all()
    # 50 us of tp in each of the 4 micro-batches
    tp = exposure.spent_ns[:, [category.value for category in CATEGORIES].index("tp")]
    assert set(tp.tolist()) == {200_000}
    assert len(explain(drawing, 11).stages) == 4


def test_explanation_of_no_steps_is_empty() -> None:
    assert shares({"a": 0, "b": 0}) == {"a": 0.0, "b": 0.0}
    assert sum(shares({"a": 1, "b": 1, "c": 1}).values()) == pytest.approx(100.0, abs=1e-9)
    empty = read_step_events(MemoryEvents(Drawing().tables()), 1, None, None)
    assert len(step_windows(empty.spans, empty.totals, 0, 10)) == 0
