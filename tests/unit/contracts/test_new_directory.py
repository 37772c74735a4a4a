"""Output directories: which may be replaced, and that replacing is atomic."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import DataError, SaveError
from megatrain.contracts.files.new_directory import DirectoryKind, new_directory, remove_abandoned
from tests.helpers.child_process import in_child
from tests.helpers.permissions import heed_permissions
from tests.helpers.refused_calls import refuse_call, renameat2_number

NAMES = ("one", "two")
KIND = DirectoryKind(NAMES.__contains__, "a data set", "a data build", "choose another --output", DataError, SaveError)


def fill(path: Path, content: str, is_forced: bool = False) -> None:
    with new_directory(path, KIND, is_forced) as staging:
        for name in NAMES:
            (staging / name).write_text(content)


def test_output_appears_at_the_end_with_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with new_directory(path, KIND, False) as staging:
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
def test_force_replaces_all(tmp_path: Path, has_exchange: bool) -> None:
    fill(tmp_path / "out", "old")
    number = renameat2_number()

    def replace() -> None:
        if not has_exchange:
            refuse_call(number)
        fill(tmp_path / "out", "new", is_forced=True)

    assert in_child(replace) == 0
    assert {(tmp_path / "out" / name).read_text() for name in NAMES} == {"new"}
    assert os.listdir(tmp_path) == ["out"]


def test_foreign_directories_and_files_are_never_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "one").write_text("mine")
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"home: holds thesis\.tex, which is not the output of a data build"):
        fill(home, "new", is_forced=True)
    assert (home / "one").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file: exists and is not a directory"):
        fill(tmp_path / "file", "new", is_forced=True)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(DataError, match="link: exists and is not a directory"):
        fill(tmp_path / "link", "new", is_forced=True)


def test_an_output_that_came_up_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with (
        pytest.raises(DataError, match="already holds a data set"),
        new_directory(path, KIND, False) as staging,
    ):
        (staging / "one").write_text("mine")
        fill(path, "theirs")
    assert (path / "one").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(SaveError, match=r"out: cannot be written: No space left on device; free some space"),
        new_directory(tmp_path / "out", KIND, False) as staging,
    ):
        (staging / "one").write_text("half")
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyError("w"), KeyboardInterrupt()], ids=["bug", "signal"])
def test_a_build_that_is_not_continued_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), new_directory(tmp_path / "out", KIND, False) as staging:
        (staging / "one").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


def fsync_that_fails(number: int, when: Callable[[str], bool]) -> Callable[[int], None]:
    """Return an fsync that fails for the paths that `when` accepts."""

    def fsync(descriptor: int) -> None:
        if when(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(number, os.strerror(number))

    return fsync


def test_a_file_system_without_fsync_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fsync_that_fails(errno.EINVAL, lambda path: True))
    fill(tmp_path / "out", "new")
    assert (tmp_path / "out" / "one").read_text() == "new"


def test_a_place_that_is_not_synced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fsync_that_fails(errno.EIO, str(tmp_path).__eq__))
    with pytest.raises(SaveError, match=r"out: is complete, but .* cannot be synced: Input/output error"):
        fill(tmp_path / "out", "new")
    assert (tmp_path / "out" / "one").read_text() == "new"


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SaveError, match=r"file/out: cannot be created: .*choose another --output"):
        fill(tmp_path / "file" / "out", "new")


def leave_behind(path: Path) -> Path:
    """Kill a build while it fills a directory; return the files that it leaves."""

    def be_killed() -> None:
        with new_directory(path, KIND, True) as filled:
            (filled / "one").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    before = set(path.parent.iterdir())
    assert in_child(be_killed) == -signal.SIGKILL
    (left,) = set(path.parent.iterdir()) - before
    return left


def test_the_next_build_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    output = tmp_path / "out"
    first, second = leave_behind(output), leave_behind(tmp_path / "out2")
    born = tmp_path / ".out.part-00000000"  # killed before it had a lock
    born.mkdir()
    fill(output, "new")
    assert not first.exists()
    assert not born.exists()
    assert second.exists()  # of another output
    leave_behind(output)
    with pytest.raises(DataError, match="already holds a data set"):
        fill(output, "newer")
    assert sorted(os.listdir(tmp_path)) == [second.name, "out"]


def test_a_running_build_keeps_its_directory(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with new_directory(output, KIND, False) as filled:
        (filled / "one").write_text("mine")
        remove_abandoned(output)
        assert (filled / "one").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_directory_that_resembles_a_staging_one_is_kept(tmp_path: Path) -> None:
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


def test_removed_new_staging_directory_gets_another_name(tmp_path: Path) -> None:
    """Another build finds it twice just after its creation: without a lock file, and before the file is locked."""
    output = tmp_path / "out"
    found: list[str] = []

    def find(event: str, arguments: tuple[Any, ...]) -> None:
        """Act as the other build, just before this one opens its first lock file, and before it locks the second."""
        is_next = event == ("open", "fcntl.flock", "")[len(found)]
        if is_next and (event != "open" or Path(str(arguments[0])).name == "lock"):
            found.append(event)
            remove_abandoned(output)

    def build() -> None:
        sys.addaudithook(find)
        fill(output, "new")
        assert found == ["open", "fcntl.flock"]

    assert in_child(build) == 0
    assert (output / "one").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_a_failed_replacement_puts_the_old_directory_back(tmp_path: Path) -> None:
    """A directory that its owner may not write cannot be moved: the old one was moved away before."""
    output = tmp_path / "out"
    fill(output, "old")

    def replace() -> None:
        heed_permissions()
        with (
            pytest.raises(SaveError, match=r"out: cannot be written: Permission denied"),
            new_directory(output, KIND, True) as filled,
        ):
            filled.chmod(0o555)

    assert in_child(replace) == 0
    assert (output / "one").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_build_killed_while_replacing_restores_the_old_output(tmp_path: Path) -> None:
    output = tmp_path / "out"
    fill(output, "old")
    left = leave_behind(output)
    output.rename(left / "replaced")
    with pytest.raises(DataError, match="already holds a data set"):
        fill(output, "new")
    assert (output / "one").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]
