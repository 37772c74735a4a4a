"""A rank hangs at any point of a step: the driver names it within the limit, without a daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.records.incident import IncidentKind
from tests.helpers.hang_sites import READ
from tests.helpers.job_under_launch import OVERLAPPED, WORKERS
from tests.helpers.recovery_checks import running_job
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import on_layout
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PATIENCE = {
    "recovery": {
        "restarts_per_hour": 100,
        "hangs_per_hour": 100,
        "host_failures_per_hour": 100,
        "hang_factor": 4.0,  # Four ranks share the cores of the tests: their steps may take a second.
    }
}
IN_FORWARD = "in forward-compute"
FIRST, APART = 8, 5
"""The step of the first fault, and the steps between two: a restart resumes from the last snapshot, of every fifth
step."""

LAYOUTS: dict[str, tuple[tuple[int, int, int], list[tuple[int, str]]]] = {
    "dp4": (
        (1, 1, 4),
        [
            (2, "before forward-compute"),
            (0, IN_FORWARD),
            (3, "before grads-reduce-scatter"),
            (1, "before params-all-gather"),
            (2, "in optimizer"),
            (0, READ),
        ],
    ),
    "tp2-dp2": (
        (2, 1, 2),
        [
            (1, "before tp-all-gather"),
            (3, "in backward-compute"),
            (2, "in optimizer"),
        ],
    ),
    "tp2-pp2": (
        (2, 2, 1),
        [
            (2, "before forward-recv"),
            (3, "before backward-send"),
            (1, "before pp-all-reduce"),
        ],
    ),
}


def with_all_stages(tp_size: int, pp_size: int, dp_size: int) -> dict[str, Any]:
    """Return the tables of a layout whose steps, of 4 samples, have as many micro-batches as there are stages."""
    return {**on_layout(tp_size, pp_size, dp_size), "batch": {"micro_batch_size": 4 // (pp_size * dp_size)}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_culprit_of_every_site_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tp_size, pp_size, dp_size), sites = LAYOUTS[name]
    orders = [(rank, FIRST + APART * number, "sleep", site) for number, (rank, site) in enumerate(sites)]
    check_named(tmp_path, capsys, orders, with_all_stages(tp_size, pp_size, dp_size))


def test_culprit_of_a_hang_in_snapshot_or_evaluation_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = write_corpus(tmp_path / "data" / "validation", 2_000, 61, seed=1)
    evaluated = {
        "data": {"train": str(tmp_path / "data" / "train"), "validation": str(validation)},
        "evaluation": {"interval": 4, "num_samples": 16},
    }
    orders = [(1, 15, "sleep", "snapshot"), (2, 24, "sleep", "evaluation"), (3, 34, "sleep", "in checkpoint")]
    check_named(tmp_path, capsys, orders, with_all_stages(1, 2, 2), evaluated)


def test_the_command_names_the_hung_rank_and_marks_its_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patient = {"recovery": {"hang_floor_s": 300.0}}
    orders = [(1, 14, "interpreter-lock", IN_FORWARD)]
    with running_job(
        tmp_path, patient, OVERLAPPED, with_all_stages(1, 2, 2), ranks_per_host=WORKERS, orders=orders
    ) as running:
        running.struck_unix_s()
        words = ["diag", "hang", str(running.job.files.root), "--blackbox", str(tmp_path / "job" / "boxes")]

        def found() -> Any:
            assert main([*words, "--stacks", "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        wait_until(lambda: [one["rank"] for one in found()["suspects"]] == [1], "the others to wait")
        answer = found()
        assert answer["confidence"] == "certain"
        assert answer["stacks"]["outliers"] == [1], answer["stacks"]
        assert answer["stacks"]["shared"]["name"] == "rank 1"
        assert answer["grid"]["letters"].count("X") == 1


def check_named(root: Path, capsys: pytest.CaptureFixture[str], orders: list[tuple[Any, ...]], *changes: Any) -> None:
    """Run a job whose ranks hang at the given sites: the driver names each, and so does `megatrain diag hang`
    afterwards."""
    with running_job(root, PATIENCE, OVERLAPPED, *changes, ranks_per_host=WORKERS, orders=orders) as running:
        code = running.finish()
        incidents = running.view.incidents()
        assert len(incidents) == len(orders), incidents
        for number, (rank, _, _, site) in enumerate(orders):
            incident = incidents[number]
            assert incident.kind is IncidentKind.HANG, site
            assert incident.culprit_ranks == (rank,), (site, incident)
            assert incident.culprit_hosts == (f"host-{rank // 2}",), site
            assert incident.moments.detected >= running.struck_unix_s(number), (site, incident)
            words = ["diag", "hang", str(running.job.files.root), "--round", str(incident.round), "--json"]
            assert main(words) == 0
            reported = json.loads(capsys.readouterr().out)
            assert [one["rank"] for one in reported["suspects"]] == [rank], (site, reported)
        assert code == 0
        running.check_nothing_left()
