"""One warning, with figures, if overlap is on but almost nothing overlaps; there is no false alarm."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.telemetry.step_summary import OperationTotals, StepSummary
from megatrain.training.observers.overlap_watch import (
    LEFT_OUT_STEPS,
    WATCHED_STEPS,
    OverlapWatch,
    warning,
    watched_kinds,
)
from tests.helpers.completed_steps import completed_step
from tests.helpers.training_case import make_config, on_layout

REDUCE, GATHER = Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER
TP_GATHER, TP_REDUCE = Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER
MS = 10**6
Tables = dict[str, dict[str, Any]]
Totals = dict[Operation, tuple[float, float | None]]
"""By operation: ms in total, and ms of these during which the host waited."""


def dp_config(*changes: Tables) -> Config:
    return make_config(on_layout(1, 1, 2), *changes)


def step(number: int, totals: Totals, step_ms: float = 100) -> StepSummary:
    """Return a step that spent its time on `totals`."""
    spent = {
        operation: OperationTotals(
            round(total * MS), round(total * MS), 1, 1000, None if attended is None else round(attended * MS)
        )
        for operation, (total, attended) in totals.items()
    }
    return StepSummary(number, 0, round(step_ms * MS), spent)


def warned(config: Config, totals: Totals, step_ms: float = 100) -> str:
    steps = [step(number, totals, step_ms) for number in range(5, 25)]
    return warning(steps, watched_kinds(config, config.layout(None)))


def test_warning_has_figures_and_a_hint() -> None:
    assert warned(dp_config(), {REDUCE: (20, 19.5), GATHER: (10, 2)}) == (
        "warning: parallel.overlap=true overlapped almost nothing in steps 6 to 25. grads-reduce-scatter: waited for "
        "19.500 of its 20.000 ms a step, 20% of the step. `megatrain config check --dry-run` shows what this layout "
        "can overlap, and `megatrain diag explain` shows what a step waits for"
    )


def test_warning_names_both_exchanges() -> None:
    text = warned(dp_config(), {REDUCE: (20, 20), GATHER: (10, 10)})

    assert text.count("warning") == 1
    assert "20% of the step. params-all-gather: waited for 10.000" in text


def test_there_is_no_false_alarm() -> None:
    cases: list[tuple[Totals, float]] = [
        ({}, 100),
        ({REDUCE: (20, 18)}, 100),  # A tenth may be overlapped.
        ({REDUCE: (2, 2)}, 100),  # too little to matter
        ({REDUCE: (20, 20)}, 1000),
        ({GATHER: (20, None)}, 100),  # On a device it is unknown what the host waited for.
        ({REDUCE: (20, None)}, 100),
        ({Operation.FORWARD_RECV: (60, 60)}, 100),  # the bubble
        ({TP_GATHER: (60, 60)}, 100),  # not in chunks, so not intended to overlap
    ]
    for totals, step_ms in cases:
        assert warned(dp_config(), totals, step_ms) == "", totals


def test_a_step_without_the_exchange_counts_as_zero() -> None:
    steps = [step(number, {REDUCE: (20, 20)} if number == 5 else {}) for number in range(5, 25)]

    assert warning(steps, (REDUCE, GATHER)) == ""


@pytest.mark.parametrize(("num_chunks", "is_warned"), [(1, False), (4, True)])
def test_sequence_chunks_are_watched_too(num_chunks: int, is_warned: bool) -> None:
    config = make_config(on_layout(2, 1, 1), {"parallel": {"num_sequence_chunks": num_chunks}})

    text = warned(config, {TP_GATHER: (20, 19.5), TP_REDUCE: (20, 5)})

    assert ("tp-all-gather: waited for 19.500 of its 20.000 ms" in text) is is_warned
    assert "tp-reduce-scatter" not in text


@pytest.mark.parametrize(
    ("config", "warned_at"),
    [
        (dp_config(), [LEFT_OUT_STEPS + WATCHED_STEPS - 1]),
        (dp_config({"parallel": {"overlap": False}}), []),
        (make_config(on_layout(1, 1, 1)), []),
    ],
    ids=["dp 2", "overlap off", "no replicas"],
)
def test_the_warning_comes_once_and_leaves_out_the_first_steps(config: Config, warned_at: list[int]) -> None:
    summaries = iter([step(number, {REDUCE: (20, 0 if number < LEFT_OUT_STEPS else 20)}) for number in range(100)])
    watch = OverlapWatch(config, config.layout(None), lambda: next(summaries))

    texts = [watch.after_step(completed_step(index)) for index in range(100)]

    assert [index for index, text in enumerate(texts) if text] == warned_at
