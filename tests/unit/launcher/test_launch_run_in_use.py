"""A launch into a run directory in use changes nothing of the job that trains there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import make_own_directory
from megatrain.run_files.run_directory import RunDirectory, black_box_path, own_box_directory
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import LaunchPlan, make_plan
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import small_flags


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    etcd_program()
    return make_plan(small_flags(tmp_path), {})


@pytest.fixture
def run(plan: LaunchPlan) -> RunDirectory:
    run = RunDirectory(plan.files.run)
    run.create()
    return run


@pytest.fixture
def box(plan: LaunchPlan, run: RunDirectory) -> Path:
    directory = Path(plan.config.telemetry.black_box_directory)
    make_own_directory(own_box_directory(directory))
    return black_box_path(Path(plan.config.telemetry.black_box_directory), "small", run.key, "main", 1, 0)


@pytest.mark.slow
def test_a_second_launch_leaves_the_black_boxes_of_the_first(plan: LaunchPlan, box: Path) -> None:
    reported: list[str] = []

    def train(_: ExecutorSettings) -> int:
        box.touch()
        with pytest.raises(ConfigError, match="has launched a job there that still runs"):
            run_launch(plan, {}, lambda _: 0, reported.append)
        assert box.exists()
        return 0

    assert run_launch(plan, {}, train, reported.append) == 0
    assert not box.exists()
    assert reported == []


@pytest.mark.slow(kept=["75"])
@pytest.mark.parametrize("code", [75, 78])
def test_job_with_another_etcd_keeps_its_snapshots(
    plan: LaunchPlan, run: RunDirectory, box: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for name in ("release_snapshots", "find_snapshots"):
        monkeypatch.setattr(f"megatrain_launcher.launch.standalone.{name}", lambda *_: pytest.fail("called"))
    box.touch()
    with run.locked():
        assert run_launch(plan, {}, lambda _: code, lambda _: None) == code
    assert box.exists()
