"""The fraction of a job's time that counted: compared with the driver's own ratio, and within the last hour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain_diagnostics.analysis.effective_time import Restart, effective_time_ratio
from megatrain_job.jobs import lost_time
from megatrain_job.jobs.lost_time import MEDIAN_NOTE, covered_s, measured_restart_cost_s
from tests.helpers.launched_job import make_incident

BEGIN_S = 1_000_000.0
HOUR_S = 3600.0


def incident(began_s: float, down_s: float, lost: int, *, number: int = 1) -> Incident:
    base = make_incident(f"{number:04d}")
    moments = replace(base.moments, began=began_s, detected=began_s + 1, first_step=began_s + down_s)
    return replace(base, moments=moments, round=number, last_step=100, resumed_step=100 - lost,
                   notes={MEDIAN_NOTE: "2"})  # fmt: skip


def test_ratio_without_events_is_the_drivers() -> None:
    incidents = [incident(BEGIN_S + 1000, 60, 10), incident(BEGIN_S + 3000, 30, 5, number=2)]
    now_s = BEGIN_S + 4000
    of_driver = lost_time.effective_time_ratio(incidents, BEGIN_S, now_s)
    assert of_driver == pytest.approx(1 - (60 + 20 + 30 + 10) / 4000)
    assert effective_time_ratio(incidents, (), BEGIN_S, now_s) == pytest.approx(of_driver)


def test_steps_in_events_count_by_their_own_time() -> None:
    failed_s = BEGIN_S + 1000
    restarts = [Restart(1, failed_s - 25, failed_s - 1)]
    found = effective_time_ratio([incident(failed_s, 60, 10)], restarts, BEGIN_S, BEGIN_S + 2000)
    assert found == pytest.approx(1 - (60 + 24) / 2000)


def test_the_last_hour_holds_what_was_lost_within_it() -> None:
    now_s = BEGIN_S + 10 * HOUR_S
    hour_s = now_s - HOUR_S
    # The failure was before the hour; its recovery extends into it.
    found = effective_time_ratio([incident(hour_s - 100, 400, 10)], (), hour_s, now_s)
    assert found == pytest.approx(1 - 300 / HOUR_S)
    assert effective_time_ratio([incident(BEGIN_S + 50, 60, 10)], (), hour_s, now_s) == 1.0


def test_open_incident_loses_time_up_to_now_and_a_hold_none() -> None:
    opened = incident(BEGIN_S + 900, 0, 0)
    opened = replace(opened, state=IncidentState.OPEN, moments=replace(opened.moments, first_step=None))
    assert effective_time_ratio([opened], (), BEGIN_S, BEGIN_S + 1000) == pytest.approx(0.9)
    held = replace(opened, state=IncidentState.HELD)
    assert effective_time_ratio([held], (), BEGIN_S, BEGIN_S + 1000) == 1.0


def test_times_that_overlap_count_once() -> None:
    both = [incident(BEGIN_S + 100, 60, 0), incident(BEGIN_S + 120, 60, 0, number=2)]
    assert effective_time_ratio(both, (), BEGIN_S, BEGIN_S + 1000) == pytest.approx(0.92)
    assert covered_s([(0.0, 10.0), (2.0, 3.0), (9.0, 20.0)], 5.0, 15.0) == 10.0


def test_ratio_of_no_time_is_none() -> None:
    assert effective_time_ratio([], (), BEGIN_S, BEGIN_S) is None


def test_the_cost_of_a_restart_is_the_median_of_the_newest() -> None:
    assert measured_restart_cost_s([]) is None
    some = [incident(BEGIN_S + 100 * n, 10.0 * n, n, number=n) for n in (1, 2, 3)]
    assert measured_restart_cost_s(some) == pytest.approx(20 + 2 * 2)
    still_open = replace(some[2], state=IncidentState.OPEN)
    assert measured_restart_cost_s([some[0], still_open]) == pytest.approx(10 + 2)
