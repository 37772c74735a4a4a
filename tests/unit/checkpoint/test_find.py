"""The meaning of a path or URL on a command line: a run, a branch or a checkpoint, and which checkpoint is found in
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.checkpoint.find import find_checkpoint
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.round_starts import start_location, started_rounds
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import go_back, put_checkpoint, put_main, put_manifest


def find(text: Path | str) -> Path:
    return Path(str(find_checkpoint(str(text))))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that went back from step 30 to step 20, and has saved step 25 since."""
    checkpoints = LocalLocation(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    put_main(checkpoints, 10, 20, 30)
    go_back(checkpoints, 20, "back")
    put_checkpoint(checkpoints / "branch-0002", 25)
    return tmp_path / "run"


def test_a_checkpoint_is_found_by_any_directory_above_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in [
        ("", "branch-0002/step-000000025"),
        ("checkpoints", "branch-0002/step-000000025"),
        ("checkpoints/branch-0002", "branch-0002/step-000000025"),
        ("checkpoints/main", "main/step-000000030"),
        ("checkpoints/main/step-000000010", "main/step-000000010"),
    ]:
        assert find(run / name).resolve() == run / "checkpoints" / expected
        monkeypatch.chdir(run / name)
        assert find(Path()).resolve() == run / "checkpoints" / expected, name


def test_branch_without_checkpoints_means_its_origin(run: Path) -> None:
    LocalLocation(run / "checkpoints/branch-0002/step-000000025").remove()
    for name in ("", "checkpoints/branch-0002"):
        assert find(run / name) == run / "checkpoints/main/step-000000020"


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for name, content in (("empty", ""), ("files", "notes.txt"), ("run", "checkpoints/notes.txt")):
        (tmp_path / name).mkdir()
        if content:
            LocalLocation(tmp_path / name / content).write(b"")
        with pytest.raises(CheckpointError, match=f"{name} is not a checkpoint and contains none"):
            find(tmp_path / name)
    new_run = tmp_path / "new-run"
    put_main(LocalLocation(new_run / "checkpoints"))
    for path in (new_run, new_run / "checkpoints", new_run / "checkpoints" / "main"):
        with pytest.raises(CheckpointError, match="is not a checkpoint and contains none"):
            find(path)


def test_uncommitted_checkpoints_are_refused(tmp_path: Path) -> None:
    put_manifest(put_main(LocalLocation(tmp_path / "checkpoints")), 10)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "main"):
        with pytest.raises(CheckpointError, match=r"holds main/step-000000010, but no committed checkpoint"):
            find(path)


def test_checkpoints_outside_of_branches_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000000010").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds step-000000010, but no committed checkpoint"):
        find(tmp_path)


def test_a_torn_resume_is_refused_although_there_are_checkpoints(run: Path) -> None:
    checkpoints = LocalLocation(run / "checkpoints")
    start_location(checkpoints, started_rounds(checkpoints)[-1]).write(b'{"branch')
    with pytest.raises(CheckpointError, match=r"\.resume: not JSON"):
        find(run)
    assert find(run / "checkpoints" / "main").name == "step-000000030"
