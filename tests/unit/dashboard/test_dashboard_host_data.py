"""Waits for data and the data loader of a host on the page, from stored rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from megatrain.config.data import DataConfig
from megatrain.config.picture_files import PicturesConfig
from megatrain.contracts.black_box.operations import OF_PRODUCERS, Operation, StepValue
from megatrain.contracts.layout import Layout
from megatrain.contracts.log_messages import REPLACED_SAMPLES
from megatrain_dashboard.api.host_data import route as host_data
from megatrain_diagnostics.events.tables import LogLines, Table, Values, from_columns, joined, select
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.single_rank import make_config
from tests.helpers.synthetic_steps import START_NS, STEP_S, SyntheticJob, values_of_ranks

LAYOUT = Layout(tp_size=2, dp_size=2)
NUM_STEPS = 250
RESTART = 200
LATE = 240
"""The step for which the ranks of host-1 wait."""


def loader_rows(made: SyntheticJob, step: int) -> list[Table]:
    """Return the rows of a step. The loader of host-1 reads replica 1 for ranks 2 and 3."""
    is_late = step == LATE
    made.data_s = {2: 0.5, 3: 0.25} if is_late else {}
    read_s = np.where(np.arange(4) == 2, 0.75 if is_late else 0.1, 0.0)
    totals, values = made.step(step, {Operation.DATA_READ: read_s})
    is_read = totals.operation == Operation.DATA_READ.number
    num_bytes = np.where(is_read, 6000, totals.num_bytes)
    reported = select(replace(totals, num_bytes=num_bytes), ~is_read | (totals.rank == 2))
    ready = values_of_ranks((2, 3), step, {StepValue.STEPS_READY: 0.0 if is_late else 2.0})
    cache = {
        StepValue.CACHE_HIT_BYTES: 500.0 * step,
        StepValue.CACHE_FETCHED_BYTES: 4096.0 * step,
        StepValue.CACHE_EVICTED_BYTES: 1024.0 * max(0, step - 10),
        StepValue.CACHE_NOT_STORED: float(step >= LATE),
    }
    starts = values_of_ranks((2,), step, {StepValue.LOADER_STARTS: 1.0 if step < RESTART else 2.0} | cache)
    return [
        reported,
        values,
        replace(ready, sequence=ready.sequence + 500),
        replace(starts, sequence=starts.sequence + 501),
    ]


Producer = tuple[float, float, float, float]
"""What a producer did in a step: its values, in the order of OF_PRODUCERS."""


def producer_rows(rank: int, step: int, producers: list[Producer]) -> Values:
    """Return the values of a rank about producers, as a rank records them."""
    each = [values_of_ranks((rank,), step, dict(zip(OF_PRODUCERS, producer, strict=True))) for producer in producers]
    rows = joined(Values, each)
    return replace(rows, sequence=1000 * step + 600 + np.arange(len(rows.rank)))


def picture_rows(made: SyntheticJob, step: int) -> list[Table]:
    """Return the rows of a step in which both ranks of host-1 read for their replicas; rank 3 every second step.

    The second producer answers until step LATE; the third one is never asked.
    """
    is_late = step >= LATE
    wait_s = np.where(np.arange(4) >= 2, 0.5 if is_late else 0.125, 0.0)
    second: Producer = (0.0, 0.0, 0.0, 2.0) if is_late else (8.0, 0.25, 1.0, 0.0)
    producers: list[Producer] = [(24.0, 0.125, float(step % 5), 0.0), second, (0.0, 0.0, 0.0, 0.0)]
    reading = (2, 3) if step % 2 else (2,)
    totals, values = made.step(step, {Operation.PICTURE_WAIT: wait_s})
    return [totals, values, *(producer_rows(rank, step, producers) for rank in reading)]


def log_rows(lines: list[tuple[int, int, str]]) -> LogLines:
    """Return lines of ranks of host-1 and host-0: step, rank, line."""
    return from_columns(
        LogLines,
        {
            "round": [1] * len(lines),
            "rank": [rank for _, rank, _ in lines],
            "sequence": list(range(len(lines))),
            "at_ns": [START_NS + int(step * STEP_S * 1e9) for step, _, _ in lines],
            "host": [f"host-{rank // 2}" for _, rank, _ in lines],
            "line": [line for _, _, line in lines],
        },
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    made, directory = SyntheticJob(LAYOUT, ranks_per_host=2), tmp_path_factory.mktemp("run")
    rows = [row for step in range(NUM_STEPS) for row in loader_rows(made, step)]
    return picture_client(PictureSource(stored_events(directory, made.ranks(), *rows)), host_data.router)


def asked(page: TestClient, host: str, **query: str) -> dict[str, Any]:
    response = page.get(f"/hosts/{host}/data", params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_waits_and_loader_of_the_newest_steps(page: TestClient) -> None:
    found = asked(page, "host-1")
    assert (found["first_step"], found["last_step"]) == (10, 249)
    first, second = found["ranks"]
    assert (first["rank"], first["longest_wait_step"], first["num_not_ready"]) == (2, LATE, 1)
    assert (first["longest_wait_s"], second["longest_wait_s"]) == (pytest.approx(0.502), pytest.approx(0.252))
    assert first["wait_s"] == pytest.approx((239 * 0.002 + 0.502) / 240)
    assert [round(value, 3) for value in first["wait_history"]] == [0.002] * 57 + [0.502] + [0.002] * 2
    loader = found["loader"]
    assert (loader["replicas"], loader["num_bytes"], loader["num_starts"]) == ([1], 6000.0, 2)
    assert (loader["num_ready"], loader["least_ready"], loader["most_ready"]) == (2, 0, None)
    assert loader["ready_history"] == [2.0] * 57 + [0.0] + [2.0] * 2
    cache = {"hit_bytes": 500.0, "fetched_bytes": 4096.0, "evicted_bytes": 1024.0, "num_not_stored": 1}
    assert found["cache"] == cache
    assert (loader["read_s"], loader["longest_read_s"]) == (
        pytest.approx((239 * 0.1 + 0.75) / 240),
        pytest.approx(0.75),
    )


def test_data_of_a_range_are_those_of_its_last_steps(page: TestClient) -> None:
    found = asked(page, "host-1", **{"from": "100", "to": "149"})
    assert (found["first_step"], found["last_step"], found["loader"]["num_starts"]) == (100, 149, 1)
    assert len(found["ranks"][0]["wait_history"]) == 50


def test_host_without_a_loader_has_waits_alone(page: TestClient, tmp_path: Path) -> None:
    found = asked(page, "host-0")
    assert (found["loader"], found["cache"]) == (None, None)
    assert [(rank["rank"], rank["num_not_ready"]) for rank in found["ranks"]] == [(0, None), (1, None)]
    for host, client in (
        ("host-9", page),
        ("host-0", picture_client(PictureSource(stored_events(tmp_path)), host_data.router)),
    ):
        nothing = asked(client, host)
        assert (nothing["host"], nothing["last_step"], nothing["ranks"]) == (host, None, [])


def test_producers_of_pictures_and_replaced_samples(tmp_path: Path) -> None:
    made = SyntheticJob(LAYOUT, ranks_per_host=2)
    rows = [row for step in range(NUM_STEPS) for row in picture_rows(made, step)]
    bad = "sample 7 is replaced by one without labels: /data/s.tar: 3.jpg (sample 3): it has no caption"
    lines = log_rows([
        (2, 2, f"WARNING {REPLACED_SAMPLES}before the steps that are shown"),
        (30, 2, f"10:00:30 WARNING {REPLACED_SAMPLES}{bad}"),
        (31, 0, f"10:00:31 WARNING {REPLACED_SAMPLES}of another host"),
        (32, 3, f"10:00:32 WARNING {REPLACED_SAMPLES}another sample"),
        (33, 3, "10:00:33 an unrelated line"),
    ])  # fmt: skip
    named = PicturesConfig(addresses="10.0.0.7:7300, [::1]:7301")
    config = replace(make_config(), pictures=named, data=DataConfig(prefetch=3))
    source = PictureSource(stored_events(tmp_path, made.ranks(), *rows, lines), config=config)
    page = picture_client(source, host_data.router)
    found = asked(page, "host-1")
    # both ranks read in half of the steps
    wall_s = found["step_s"] + found["ranks"][0]["wait_s"]
    pictures = found["pictures"]
    assert pictures["wait_s"] == pytest.approx((230 * 0.25 + 10 * 1.0) / 240)
    assert pictures["longest_wait_s"] == pytest.approx(1.0)
    first, second, third = pictures["producers"]
    assert (first["address"], second["address"], third["address"]) == ("10.0.0.7:7300", "[::1]:7301", "")
    assert (first["state"], second["state"], third["state"]) == ("answers", "failed", "not-asked")
    assert first["pictures_per_s"] == pytest.approx(1.5 * 24 / wall_s)
    assert second["pictures_per_s"] == pytest.approx(1.5 * 8 * 230 / 240 / wall_s)
    assert [one["answer_s"] for one in pictures["producers"]] == [0.125, 0.25, None]
    assert [one["num_waiting"] for one in pictures["producers"]] == [4, 1, 0]
    assert [one["num_failed"] for one in pictures["producers"]] == [0, 30, 0]
    assert second["pictures_history"][-4:] == [12.0, 6.0, 0.0, 0.0]
    assert [(one["rank"], one["text"]) for one in found["replaced_samples"]] == [(3, "another sample"), (2, bad)]
    other = asked(page, "host-0")
    assert (other["pictures"], [one["text"] for one in other["replaced_samples"]]) == (None, ["of another host"])
