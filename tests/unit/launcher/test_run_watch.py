"""The driver restores removed directories of a run, and watches the checkpoint from which it would resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.checkpoint_format.verifications import Verification, record_verifications
from megatrain.run_files.run_directory import RunDirectory
from megatrain_launcher.driver import run_watch
from megatrain_launcher.driver.incident_files import IncidentFiles
from megatrain_launcher.driver.resume_point_watch import ResumePointWatch, local_checkpoints
from megatrain_launcher.driver.run_watch import RunWatch, watched_directories
from tests.helpers.checkpoint_tree import put_branch, put_checkpoint, put_resume
from tests.helpers.launched_job import make_incident
from tests.helpers.training_case import make_config
from tests.helpers.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.mark.slow(kept=["checkpoints"])
@pytest.mark.parametrize("name", ["metrics", "events", "incidents", "diagnosis", "checkpoints"])
def test_removed_run_directory_is_restored_and_reported(run: RunDirectory, name: str) -> None:
    watched, path = watched_directories(make_config(), run), run.root / name
    lost: list[Path] = []
    with RunWatch(watched, lost.append) as watch:
        wait_until(lambda: watch.has_polled, "the first poll")
        shutil.rmtree(path)
        wait_until(lambda: lost == [path], "the loss")
        assert path.is_dir()
        (text,) = watch.problems
        assert text.startswith(f"{path} was removed from outside at ")
        assert text.endswith(watched[path])


@pytest.mark.slow(kept=["True"])
@pytest.mark.parametrize("is_driving", [True, False])
def test_only_the_driver_logs_a_loss(run: RunDirectory, caplog: pytest.LogCaptureFixture, is_driving: bool) -> None:
    path = run.metrics
    with RunWatch({path: "its records are lost"}, is_driving=lambda: is_driving) as watch:
        wait_until(lambda: watch.has_polled, "the first poll")
        shutil.rmtree(path)
        wait_until(lambda: bool(watch.problems), "the loss to be known")
        wait_until(path.is_dir, "the directory")
    # only its own messages: threads of earlier tests may still log
    logged = [record.getMessage() for record in caplog.records if record.name == run_watch.__name__]
    assert (list(watch.problems) == logged) is is_driving
    assert bool(logged) is is_driving


@pytest.mark.slow
def test_unrestorable_directory_is_reported_until_restored(tmp_path: Path) -> None:
    real, root, other = tmp_path / "real", tmp_path / "run", tmp_path / "other"
    (real / "metrics").mkdir(parents=True)
    root.symlink_to(real)
    (tmp_path / "file").touch()
    with RunWatch({root / "metrics": "its records are lost"}) as watch:
        wait_until(lambda: watch.has_polled, "the first poll")
        other.symlink_to(tmp_path / "file")
        other.replace(root)
        wait_until(lambda: len(watch.problems) == 2, "the problem")
        assert watch.problems[1] == f"{root / 'metrics'} cannot be created again: Not a directory"
        other.symlink_to(real)
        other.replace(root)
        wait_until(lambda: len(watch.problems) == 1, "the end of the problem")


def test_checkpoints_elsewhere_are_watched_there(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = {"checkpoint": {"directory": str(tmp_path / "elsewhere")}}
    assert tmp_path / "elsewhere" in watched_directories(make_config(elsewhere), run)
    remote = {"checkpoint": {"directory": "s3://bucket/place"}}
    assert len(watched_directories(make_config(remote), run)) == 4


def test_incidents_are_written_again(run: RunDirectory) -> None:
    names = [make_incident(name) for name in ("0001", "0002")]
    with IncidentFiles(run.incidents) as files:
        for incident in names:
            files.write(incident)
        places = [run.incidents / f"{incident.incident_id}.json" for incident in names]
        wait_until(lambda: all(place.exists() for place in places), "the files")
        shutil.rmtree(run.incidents)
        files.write_again()
        wait_until(lambda: all(place.exists() for place in places), "the files again")
    assert [json.loads(place.read_text())["incident_id"] for place in places] == [name.incident_id for name in names]


POLL_S = 0.02
NEWEST = 20


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two intact checkpoints, each with one file."""
    place = LocalLocation(tmp_path)
    put_resume(place, "main")
    branch = put_branch(place, "main")
    for step in (10, NEWEST):
        save(tmp_path, step)
    assert branch.entries()
    return tmp_path


def save(checkpoints: Path, step: int) -> None:
    files = {"r000002-rank-00000.distcp": FileEntry(10, "items-sha256:" + "0a" * 32)}
    (data_file(checkpoints, step)).parent.mkdir()
    data_file(checkpoints, step).write_bytes(b"x" * 10)
    put_checkpoint(LocalLocation(checkpoints / "main"), step, files=files)


def data_file(checkpoints: Path, step: int) -> Path:
    return checkpoints / "main" / step_directory_name(step) / "r000002-rank-00000.distcp"


def verified(checkpoints: Path, step: int, problem: str, at_unix_s: float = 4e9) -> None:
    """Record the result of a verification, as `megatrain ckpt verify` does."""
    record_verifications(
        LocalLocation(checkpoints), [Verification.of("main", step, at_unix_s, [problem] if problem else [])]
    )


@pytest.mark.slow(kept=["branch", "without manifest", "all", "cut short"])
@pytest.mark.parametrize(
    ("harm", "reported"),
    [
        (lambda root: data_file(root, NEWEST).unlink(), ("missing, expected 10 bytes", "resume from step 10")),
        (lambda root: data_file(root, NEWEST).write_bytes(b"x"), ("1 bytes, expected 10", "resume from step 10")),
        (lambda root: next((root / "main").glob("*020/*manifest*")).unlink(), ("20 is skipped", "from step 10")),
        (
            lambda root: verified(root, NEWEST, problem="items-sha256 is wrong"),
            ("20 is skipped: `megatrain ckpt verify` found", "items-sha256 is wrong", "resume from step 10"),
        ),
        (lambda root: (root / "main" / "BRANCH").write_bytes(b"\0"), ("no checkpoint can be found", "BRANCH")),
        (
            lambda root: [data_file(root, step).unlink() for step in (10, NEWEST)],
            ("NO CHECKPOINT CAN BE LOADED", "is damaged"),
        ),
    ],
    ids=["removed", "cut short", "without manifest", "verified", "branch", "all"],
)
def test_damage_is_reported_until_the_next_checkpoint(
    checkpoints: Path, harm: Callable[[Path], object], reported: tuple[str, ...]
) -> None:
    branch = (checkpoints / "main" / "BRANCH").read_bytes()
    with ResumePointWatch(checkpoints, poll_s=POLL_S) as watch:
        harm(checkpoints)
        wait_until(lambda: bool(watch.damage), "the report of the damage")
        assert all(part in watch.damage for part in reported), watch.damage
        (checkpoints / "main" / "BRANCH").write_bytes(branch)
        save(checkpoints, 30)
        wait_until(lambda: not watch.damage, "the end of the report")


def test_normal_changes_of_checkpoints_are_no_damage(checkpoints: Path, tmp_path: Path) -> None:
    """An old checkpoint that is removed, one that is being written, and no checkpoint at the beginning.

    The same for a problem of an earlier checkpoint in the same place.
    """
    polls: list[None] = []

    def is_driving() -> bool:
        polls.append(None)
        return True

    with ResumePointWatch(checkpoints, is_driving, poll_s=POLL_S) as watch:
        shutil.rmtree(data_file(checkpoints, 10).parent)
        verified(checkpoints, NEWEST, problem="what stood there before", at_unix_s=1.0)
        (checkpoints / "main" / step_directory_name(30)).mkdir()
        (checkpoints / "main" / step_directory_name(30) / "WRITING").touch()
        seen = len(polls)
        wait_until(lambda: len(polls) > seen + 4, "four polls")
        assert watch.damage == ""
    for nothing in (tmp_path / "never", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        seen = len(polls)
        with ResumePointWatch(nothing, is_driving, poll_s=POLL_S) as watch:
            wait_until(lambda seen=seen: len(polls) > seen + 4, "four polls")
            assert watch.damage == ""


def test_standby_driver_reads_no_checkpoints(checkpoints: Path) -> None:
    data_file(checkpoints, NEWEST).unlink()
    asked: list[None] = []

    def is_driving() -> bool:
        asked.append(None)
        return False

    with ResumePointWatch(checkpoints, is_driving, poll_s=POLL_S) as watch:
        wait_until(lambda: len(asked) > 4, "four polls")
        assert watch.damage == ""


def test_checkpoints_on_s3_are_not_watched(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert local_checkpoints(make_config(), run) == run.checkpoints
    assert local_checkpoints(make_config({"checkpoint": {"directory": "s3://bucket/place"}}), run) is None
