"""Output directories: what may be replaced, and that replacing is all or nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data import output as output_module
from megatrain.data.output import new_directory, remove_abandoned

NAMES = ("one", "two")


def fill(path: Path, content: str, is_forced: bool = False) -> None:
    with new_directory(path, NAMES, is_forced) as staging:
        for name in NAMES:
            (staging / name).write_text(content)


def test_it_appears_at_the_end_with_missing_parents_and_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with new_directory(path, NAMES, False) as staging:
        assert not path.exists()
        (staging / "one").write_text("1")
    (tmp_path / "plain").mkdir()
    assert os.listdir(path) == ["one"]
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "new")
    assert (tmp_path / "out" / "one").read_text() == "new"


@pytest.mark.parametrize("has_exchange", [True, False])
def test_force_replaces_all(tmp_path: Path, has_exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_exchange:
        monkeypatch.setattr(output_module, "_exchange", lambda first, second: False)
    fill(tmp_path / "out", "old")
    fill(tmp_path / "out", "new", is_forced=True)
    assert {(tmp_path / "out" / name).read_text() for name in NAMES} == {"new"}
    assert os.listdir(tmp_path) == ["out"]


def test_foreign_directories_and_files_are_never_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "one").write_text("mine")
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"home: holds thesis\.tex, which no data build made"):
        fill(home, "new", is_forced=True)
    assert (home / "one").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file: exists and is no directory"):
        fill(tmp_path / "file", "new", is_forced=True)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(DataError, match="link: exists and is no directory"):
        fill(tmp_path / "link", "new", is_forced=True)


def test_an_output_that_came_up_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with (
        pytest.raises(DataError, match="already holds a data set"),
        new_directory(path, NAMES, False) as staging,
    ):
        (staging / "one").write_text("mine")
        fill(path, "theirs")
    assert (path / "one").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"out: cannot be written: No space left on device; make room"),
        new_directory(tmp_path / "out", NAMES, False) as staging,
    ):
        (staging / "one").write_text("half")
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"file/out: cannot be made: .*choose another --output"):
        fill(tmp_path / "file" / "out", "new")


def leave_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Do what a build does that is killed: fill a staging directory, let go of its lock and remove nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        with pytest.raises(KeyboardInterrupt), new_directory(path, NAMES, True) as filled:
            (filled / "one").write_text("half")
            raise KeyboardInterrupt
    assert (filled / "one").exists()
    return filled.parent


def test_the_next_build_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    first, second = leave_behind(output, monkeypatch), leave_behind(tmp_path / "out2", monkeypatch)
    born = tmp_path / ".out.part-00000000"  # killed before it had a lock
    born.mkdir()
    fill(output, "new")
    assert not first.exists()
    assert not born.exists()
    assert second.exists()  # of another output
    leave_behind(output, monkeypatch)
    with pytest.raises(DataError, match="already holds a data set"):
        fill(output, "newer")
    assert sorted(os.listdir(tmp_path)) == [second.name, "out"]


def test_a_running_build_keeps_its_directory(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with new_directory(output, NAMES, False) as filled:
        (filled / "one").write_text("mine")
        remove_abandoned(output)
        assert (filled / "one").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_what_only_looks_like_a_staging_directory_is_kept(tmp_path: Path) -> None:
    foreign = tmp_path / ".out.part-0123abcd"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.part-11111111").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".out.part-22222222").write_text("a file")
    (tmp_path / ".out.part-1").mkdir()
    before = sorted(os.listdir(tmp_path))
    fill(tmp_path / "out", "new")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out"])
    assert (foreign / "thesis.tex").exists()


def test_a_directory_taken_for_abandoned_at_birth_gets_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter(["aaaaaaaa", "bbbbbbbb", "cccccccc"])
    real_open, real_flock = os.open, output_module.fcntl.flock

    # Another build finds this one just after its birth, twice: without a lock file, and before the file is locked.
    def open_late(path: Path, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
        if "aaaaaaaa" in str(path) and flags & os.O_CREAT:
            remove_abandoned(tmp_path / "out")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def lock_late(lock: int, kind: int) -> None:
        if "bbbbbbbb" in os.readlink(f"/proc/self/fd/{lock}"):
            monkeypatch.setattr(output_module.fcntl, "flock", real_flock)
            remove_abandoned(tmp_path / "out")
        real_flock(lock, kind)

    monkeypatch.setattr(output_module.secrets, "token_hex", lambda size: next(tokens))
    monkeypatch.setattr(output_module.os, "open", open_late)
    monkeypatch.setattr(output_module.fcntl, "flock", lock_late)
    with new_directory(tmp_path / "out", NAMES, False) as filled:
        assert filled.parent.name == ".out.part-cccccccc"
        (filled / "one").write_text("1")
    assert os.listdir(tmp_path) == ["out"]


def test_a_failed_replacement_puts_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    fill(output, "old")
    monkeypatch.setattr(output_module, "_exchange", lambda first, second: False)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> None:
        if path.name == "new":
            raise KeyboardInterrupt
        rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(output, "new", is_forced=True)
    assert (output / "one").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_build_killed_while_it_replaced_gives_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    fill(output, "old")
    left = leave_behind(output, monkeypatch)
    output.rename(left / "replaced")
    with pytest.raises(DataError, match="already holds a data set"):
        fill(output, "new")
    assert (output / "one").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]
