"""Removed directories of a run: the driver creates them again, writes its state again, and reports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatrain.run_files.run_directory import RunDirectory
from megatrain_launcher.driver import run_watch
from megatrain_launcher.driver.incident_files import IncidentFiles
from megatrain_launcher.driver.run_watch import RunWatch, watched_directories
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
