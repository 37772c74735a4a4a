"""The spans that the controller keeps to compute the gain of a verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatrain_diagnostics.analysis.whatif import gain_without, make_model
from megatrain_diagnostics.controller import span_window
from megatrain_diagnostics.controller.span_window import SpanWindow
from megatrain_diagnostics.events.roster import make_roster
from megatrain_diagnostics.events.tables import Clocks, from_columns, num_rows, select
from tests.helpers.pipeline_job import PipelineJob
from tests.helpers.recorded_spans import ROUND, no_groups, recorded_spans, who_ran

JOB = PipelineJob(pp_size=1, dp_size=6, slow_dp_ranks={4: 1.4}, is_overlapped=True, separate_s=0.0, noise=0.02)
TABLE = JOB.run()
SPANS = recorded_spans(TABLE, JOB.shape)
ROSTER = make_roster(who_ran(JOB.shape), no_groups(), ROUND)


def window(*parts: np.ndarray) -> SpanWindow:
    found = SpanWindow()
    for part in parts:
        found.add(select(SPANS, part))
    return found


def test_gain_does_not_depend_on_the_batches_of_spans() -> None:
    expected = gain_without(make_model(TABLE, JOB.shape), [4])
    assert expected > 0.0
    shuffled = np.random.default_rng(1).permutation(num_rows(SPANS))
    for parts in ([shuffled], np.array_split(shuffled, 9), [shuffled, shuffled[:50]]):
        assert window(*parts).gain_without([4], 0, ROSTER) == pytest.approx(expected, rel=0.02)
    assert window(shuffled).gain_without([1], 0, ROSTER) == pytest.approx(0.0, abs=0.05 * expected)


def test_only_steps_since_the_beginning_count() -> None:
    everything = np.arange(num_rows(SPANS))
    assert window(everything).gain_without([4], int(SPANS.step.max()) + 1, ROSTER) is None
    assert window().gain_without([4], 0, ROSTER) is None


def test_clocks_that_differ_by_an_hour_change_nothing() -> None:
    hour = 3_600_000_000_000
    hosts = [f"host-{rank // 2}" for rank in range(6)]
    roster = replace(ROSTER, hosts=dict(enumerate(hosts)))
    ahead = np.isin(SPANS.rank, [2, 3])
    moved = replace(
        SPANS,
        start_ns=SPANS.start_ns + ahead * hour,
        launch_ns=SPANS.launch_ns + ahead * hour,
    )
    found = SpanWindow()
    found.add(moved)
    times = [int(SPANS.start_ns.min()), int(SPANS.start_ns.max())]
    for host in sorted(set(hosts)):
        offset = hour if host == "host-1" else 0
        columns = {"at_ns": [at + offset for at in times], "offset_ns": [offset] * 2, "error_ns": [1000] * 2}
        found.add_clocks(from_columns(Clocks, {**columns, "host": [host] * 2}))
    expected = gain_without(make_model(TABLE, JOB.shape), [4])
    assert found.gain_without([4], 0, roster) == pytest.approx(expected, rel=0.02)


def test_rows_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    last_step = int(SPANS.step.max())
    older, newest = (np.flatnonzero(chosen) for chosen in (SPANS.step < last_step, SPANS.step == last_step))
    monkeypatch.setattr(span_window, "_MAX_ROWS", len(newest))
    only_newest = window(newest).gain_without([4], 0, ROSTER)
    assert only_newest is not None
    assert window(older, newest).gain_without([4], 0, ROSTER) == only_newest
