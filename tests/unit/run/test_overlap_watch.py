"""Overlap that is on and hides nothing says so once, with figures, reason and way out; there is no false alarm."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.model_size import block_weights
from megatrain.contracts.operations import Operation
from megatrain.overlap_watch import LEFT_OUT_STEPS, WATCHED_STEPS, OverlapWatch, structural_reason, warning
from megatrain.telemetry.step_summary import OperationTotals, StepSummary
from tests.helpers.training_case import make_config, on_layout

REDUCE, GATHER = Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER
TP_GATHER = Operation.TP_ALL_GATHER
MS = 10**6
Tables = dict[str, dict[str, Any]]
ONE_BUCKET: Tables = {"parallel": {"bucket_size": 10**6}}


def dp_config(*changes: Tables) -> Config:
    return make_config(on_layout(1, 1, 2), *changes)


def step(number: int, totals: dict[Operation, tuple[float, float | None]], step_ms: float = 100) -> StepSummary:
    """Return a step of which each operation took (ms in all, of it attended)."""
    return StepSummary(
        number,
        0,
        round(step_ms * MS),
        {
            operation: OperationTotals(
                round(total * MS), round(total * MS), 1, 1000, None if attended is None else round(attended * MS)
            )
            for operation, (total, attended) in totals.items()
        },
    )


def said(config: Config, totals: dict[Operation, tuple[float, float | None]], step_ms: float = 100) -> str:
    return warning(config, config.layout(None), 0, [step(number, totals, step_ms) for number in range(5, 25)])


def test_what_is_waited_for_all_the_time_is_said_with_reason_and_way_out() -> None:
    config = dp_config(ONE_BUCKET)
    text = said(config, {REDUCE: (20, 19.5), GATHER: (10, 2)})
    layer = block_weights(config.model)

    assert text == (
        "warning: parallel.overlap=true hid next to nothing in steps 6 to 25. grads-reduce-scatter: waited for 19.500 "
        "of its 20.000 ms a step, 20% of the step. Why: with one bucket of 1,000,000 elements or more the "
        f"whole gradient is reduced after the last backward. Use parallel.bucket_size={layer}, the matrices of a layer"
    )


def test_both_kinds_are_in_one_text() -> None:
    text = said(dp_config(ONE_BUCKET), {REDUCE: (20, 20), GATHER: (10, 10)})

    assert text.count("warning") == 1
    assert "20% of the step. params-all-gather: waited for 10.000" in text
    assert "all parameters are gathered before the first forward" in text


@pytest.mark.parametrize(
    ("totals", "step_ms"),
    [
        ({}, 100),
        ({REDUCE: (20, 18)}, 100),  # a tenth may be hidden
        ({REDUCE: (2, 2)}, 100),  # too little to matter
        ({REDUCE: (20, 20)}, 1000),
        ({GATHER: (20, None)}, 100),  # a device's: nobody knows
        ({Operation.FORWARD_RECV: (60, 60)}, 100),  # the bubble
        ({TP_GATHER: (60, 60)}, 100),
    ],
)
def test_nobody_is_alarmed_without_need(totals: dict[Operation, tuple[float, float | None]], step_ms: float) -> None:
    assert said(dp_config(), totals, step_ms) == ""


def test_of_a_device_the_layout_tells_and_the_longest_exchange_was_waited_for() -> None:
    totals: dict[Operation, tuple[float, float | None]] = {REDUCE: (20, None), GATHER: (20, None)}
    text = said(dp_config(ONE_BUCKET), totals)

    assert "grads-reduce-scatter: waited for 20.000 ms at least a step, 20% of the step. Why: with" in text
    assert "params-all-gather" not in text
    assert said(make_config(on_layout(1, 1, 2, 2)), totals) == ""
    assert said(dp_config(), {REDUCE: (2, None)}) == ""


def test_a_kind_that_steps_lack_counts_as_nothing_there() -> None:
    steps = [step(number, {REDUCE: (20, 20)} if number == 5 else {}) for number in range(5, 25)]

    config = dp_config()
    assert warning(config, config.layout(None), 0, steps) == ""


@pytest.mark.parametrize(
    ("changes", "operation", "is_structural"),
    [
        (({},), REDUCE, True),
        (({},), GATHER, True),
        (({"parallel": {"bucket_size": 3000}},), REDUCE, False),
        (({"parallel": {"bucket_size": 3000}},), GATHER, False),
        (({"parallel": {"zero_stage": 2}},), REDUCE, False),
        (({"parallel": {"zero_stage": 2}}, {"batch": {"global_batch_size": 4}}), REDUCE, True),
        (({"parallel": {"zero_stage": 2}},), GATHER, True),
        ((on_layout(1, 1, 2, 2),), REDUCE, False),
        ((on_layout(1, 2, 2),), REDUCE, True),
        ((on_layout(1, 2, 2),), GATHER, True),
        ((on_layout(1, 2, 2, 2),), REDUCE, False),
        ((on_layout(2, 1, 2), {"parallel": {"num_sequence_chunks": 2}}), TP_GATHER, False),
    ],
)
def test_what_no_speed_could_hide(changes: tuple[Tables, ...], operation: Operation, is_structural: bool) -> None:
    config = dp_config(ONE_BUCKET, *changes)
    layout = config.layout(None)

    assert bool(structural_reason(config, layout, 0, operation)) is is_structural
    assert all(not structural_reason(config, layout, stage, operation) for stage in range(1, layout.pp_size))


@pytest.mark.parametrize(("num_chunks", "is_said"), [(1, False), (4, True)])
def test_chunks_of_the_sequence_that_hide_nothing_are_told(num_chunks: int, is_said: bool) -> None:
    config = make_config(on_layout(2, 1, 1), {"parallel": {"num_sequence_chunks": num_chunks}})

    text = said(config, {TP_GATHER: (20, 19.5), Operation.TP_REDUCE_SCATTER: (20, 5)})

    assert ("tp-all-gather: waited for 19.500 of its 20.000 ms" in text) is is_said
    assert "tp-reduce-scatter" not in text


def test_where_it_could_be_hidden_the_reason_is_to_be_looked_for() -> None:
    text = said(make_config(on_layout(1, 1, 2, 2)), {REDUCE: (20, 20)})

    assert text.endswith("Why: megatrain diag explain shows what a step waits for")


def test_the_way_out_lets_buckets_follow_each_other() -> None:
    config = dp_config(ONE_BUCKET)
    size = int(re.search(r"parallel.bucket_size=(\d+)", said(config, {GATHER: (20, 20)}))[1])  # type: ignore[index]
    followed = replace(config, parallel=replace(config.parallel, bucket_size=size))
    assert not check(followed, {}, 2)
    assert not structural_reason(followed, followed.layout(None), 0, GATHER)


def test_graphs_are_given_up_for_overlap() -> None:
    config = dp_config()
    graphed = replace(config, kernels=replace(config.kernels, cuda_graphs=True))
    text = said(graphed, {REDUCE: (20, 20)})

    assert text.endswith(
        "Why: with kernels.cuda_graphs=true the whole gradient is reduced after the last backward. "
        "Use kernels.cuda_graphs=false"
    )


def test_it_is_said_once_and_not_of_the_first_steps() -> None:
    config = dp_config()
    watch = OverlapWatch(config, config.layout(None), 0)
    texts = [
        watch.after_step(step(number, {REDUCE: (20, 0 if number < LEFT_OUT_STEPS else 20)})) for number in range(100)
    ]

    assert [number for number, text in enumerate(texts) if text] == [LEFT_OUT_STEPS + WATCHED_STEPS - 1]


@pytest.mark.parametrize("changes", [({"parallel": {"overlap": False}},), (on_layout(1, 1, 1),)])
def test_nothing_is_watched_where_overlap_is_off_or_nobody_is_there(changes: tuple[Tables, ...]) -> None:
    config = dp_config(*changes)
    watch = OverlapWatch(config, config.layout(None), 0)

    assert {watch.after_step(step(number, {REDUCE: (20, 20)})) for number in range(100)} == {""}
