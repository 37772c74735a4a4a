"""What a launch refuses before it starts, and what it leaves in memory at its end; files of another job stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import Arena, join_arena
from megatrain.checkpoint.host_writer import start_writer
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import make_own_directory
from megatrain.run_files.run_directory import RunDirectory, black_box_path, own_box_directory
from megatrain_job.commands.etcd_flags import EtcdFlags
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import LaunchPlan, make_plan
from megatrain_launcher.leftovers import find_snapshots, release_snapshots
from tests.helpers.arena_snapshots import host_plan, make_arena
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import small_flags
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    return make_plan(small_flags(tmp_path, overrides=(f"--checkpoint.arena_directory={arenas}",)), {})


def arena_of(plan: LaunchPlan, name: str, **changes: Any) -> Path:
    reported = replace(host_plan(str(plan.files.run / "checkpoints")), **({"job": "small"} | changes))
    directory = Path(plan.config.checkpoint.arena_directory)
    return make_arena(directory / f"megatrain-arena1.{name}", reported).root


def test_snapshots_of_this_run_are_found_and_released(plan: LaunchPlan) -> None:
    run = RunDirectory(plan.files.run)
    own = [arena_of(plan, "small.h1"), arena_of(plan, "small.h2")]
    others = [arena_of(plan, "other", job="other"), arena_of(plan, "else", checkpoints="/elsewhere")]
    assert [arena.root for arena in find_snapshots(plan.config, run)] == own

    _, lock = join_arena(own[1])
    with lock:
        assert release_snapshots(plan.config, run, timeout_s=0.05) == [own[1]]
    assert release_snapshots(plan.config, run) == []
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in others)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "is_kept"), [(0, False), (75, False), (1, True)])
def test_launch_keeps_only_unsaved_snapshots(plan: LaunchPlan, code: int, is_kept: bool) -> None:
    etcd_program()
    arena = arena_of(plan, "small.h1")
    reported: list[str] = []
    assert run_launch(plan, {}, lambda _: code, reported.append) == code
    assert arena.exists() is is_kept
    expected = f"snapshots of the last steps stay in {arena} for checkpoint.keep_arena_s=1800 s"
    assert [text[: len(expected)] for text in reported] == ([expected] if is_kept else [])


@pytest.mark.parametrize(("code", "is_kept"), [(0, False), (75, False), (1, True), (68, True)])
def test_host_that_leaves_in_order_removes_its_snapshots(tmp_path: Path, code: int, is_kept: bool) -> None:
    """Whatever its role in the job, because its writer would keep them for checkpoint.keep_arena_s; never another
    host's."""
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    flags = small_flags(
        tmp_path,
        overrides=(f"--checkpoint.arena_directory={arenas}",),
        etcd=EtcdFlags(endpoints="127.0.0.1:1"),
        host_id="h1",
        local_addr="127.0.0.1",
    )
    plan = make_plan(flags, {})
    own, other = arena_of(plan, "small.main.c0ffee00.h1"), arena_of(plan, "small.main.c0ffee00.h2")
    reported: list[str] = []
    assert run_launch(plan, {}, lambda _: code, reported.append) == code
    assert own.exists() is is_kept
    assert other.exists()
    assert not any("snapshots" in text for text in reported)


def test_launch_waits_for_the_end_of_a_writer(plan: LaunchPlan) -> None:
    """Otherwise the launch would end while a part of it still runs."""
    arena = Arena(arena_of(plan, "small.h1", keep_arena_s=600.0))
    pid = start_writer(arena, plan.files.run / "writer.log")
    assert pid is not None
    wait_until(arena.writer_status.exists, "the writer")
    assert release_snapshots(plan.config, RunDirectory(plan.files.run)) == []
    assert not is_running(pid)
    assert not arena.root.exists()


@pytest.fixture
def run(plan: LaunchPlan) -> RunDirectory:
    etcd_program()
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


def launch(tmp_path: Path, **changes: Any) -> None:
    plan = make_plan(small_flags(tmp_path, **changes), {})
    run_launch(plan, {}, lambda _: pytest.fail("an executor was started"), lambda _: None)


def test_unusable_log_directory_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    place = tmp_path / "taken" / "logs"
    with pytest.raises(ConfigError, match=f"--log-dir={place}: cannot be written .Not a directory., and the ranks'"):
        launch(tmp_path, log_dir=str(place))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "logs").write_text("a file")
    with pytest.raises(ConfigError, match=r"run/logs: cannot be written .File exists., and .* set job\.run_directory"):
        launch(tmp_path)


def test_unreadable_kernel_log_is_refused_if_it_is_named(tmp_path: Path) -> None:
    place = tmp_path / "kmsg"
    launches: list[dict[str, Any]] = [{"is_standalone": True}, {"etcd": EtcdFlags("e:1")}]
    for changes in launches:
        with pytest.raises(ConfigError, match=f"--kernel-log={place}: cannot be read .No such file or directory., and"):
            launch(tmp_path, kernel_log=str(place), **changes)
