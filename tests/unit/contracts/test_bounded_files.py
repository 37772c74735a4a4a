"""Untrusted directories: bounded reads, no links; files that vanish while they are open, or are not complete yet."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.contracts.files.bounded_files import open_below, read_below, read_bounded
from megatrain.contracts.files.vanished_files import REPORT_S, RecentRemovals, WatchedPath, is_in_place
from megatrain.contracts.files.whole_files import is_temporary_name, sync_directory, temporary_name
from tests.helpers.other_user import OTHER_USER

OWNER = os.geteuid()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"content")
    return root


def test_a_file_is_read_up_to_its_bound(root: Path) -> None:
    assert read_below(root, "a/b/file", 7) == b"content"
    assert read_below(root, "a/b/file", 7, owner=OWNER) == b"content"
    assert read_bounded(root / "a" / "b" / "file", 7) == b"content"
    with pytest.raises(OSError, match="has more than 6 bytes"):
        read_below(root, "a/b/file", 6)
    with pytest.raises(FileNotFoundError) as caught:
        read_below(root, "a/nothing", 7)
    assert caught.value.filename == str(root / "a" / "nothing")


def test_link_as_the_named_directory_is_followed(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    assert read_below(root.parent / "link", "a/b/file", 7) == b"content"


@pytest.mark.parametrize(
    ("put", "problem"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "is a symbolic link, which is not followed"),
        (lambda path: path.symlink_to("nowhere"), "is a symbolic link, which is not followed"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "No such device or address"),
    ],
)
def test_special_file_is_neither_followed_nor_awaited(
    root: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], object], problem: str
) -> None:
    monkeypatch.chdir(root / "a")  # the path of a socket must be short
    put(Path("thing"))
    with pytest.raises(OSError, match=problem):
        read_below(root, "a/thing", 1 << 20)


def test_no_link_between_is_followed(root: Path) -> None:
    (root / "link").symlink_to(root / "a")
    with pytest.raises(OSError, match=r"is a symbolic link.*run/link'"):
        read_below(root, "link/b/file", 7)
    with pytest.raises(OSError, match="is a symbolic link"):
        read_bounded(root / "link" / "file", 7)


def test_name_that_leads_out_of_the_directory_is_refused(root: Path) -> None:
    for name in ("../run/a/b/file", "a/../a/b/file", "./a/b/file", "a//b/file", "/a/b/file", ""):
        with pytest.raises(OSError, match="does not name a file below the directory"):
            raise AssertionError(f"{name!r} was read: {read_below(root, name, 7)!r}")


def test_file_that_others_may_write_is_refused(root: Path) -> None:
    for part, mode in [("a", 0o770), ("a/b", 0o707), ("a/b/file", 0o620)]:
        before = (root / part).stat().st_mode
        (root / part).chmod(mode)
        assert read_below(root, "a/b/file", 7) == b"content"
        with pytest.raises(PermissionError, match=rf"can be written by others than user {OWNER} \(mode {mode:o}\)"):
            read_below(root, "a/b/file", 7, owner=OWNER)
        (root / part).chmod(before)


def test_file_of_another_user_is_refused(root: Path) -> None:
    if OWNER != 0:
        pytest.skip("only root can give a file away")
    for part in ("a", "a/b", "a/b/file"):
        os.chown(root / part, OTHER_USER, OTHER_USER)
        with pytest.raises(PermissionError, match=f"belongs to user {OTHER_USER}, not to user {OWNER}"):
            raise AssertionError(f"{part} was read: {read_below(root, 'a/b/file', 7, owner=OWNER)!r}")
        os.chown(root / part, OWNER, os.getegid())


def test_secret_is_readable_by_its_owner_only(root: Path) -> None:
    secret = root / "a" / "b" / "file"
    secret.chmod(0o600)
    assert read_below(root, "a/b/file", 7, is_secret=True) == b"content"
    secret.chmod(0o640)
    with pytest.raises(PermissionError, match="has mode 640"):
        read_below(root, "a/b/file", 7, is_secret=True)


def test_checked_file_is_the_file_that_is_read(root: Path) -> None:
    path = root / "a" / "b" / "file"
    descriptor = open_below(root, "a/b/file", owner=OWNER)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with open(descriptor, "rb") as file:
        assert file.read() == b"content"


def remake(path: Path) -> None:
    path.unlink()
    path.write_text("another")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: path.write_text("more"), True),
        (lambda path: path.unlink(), False),
        (remake, False),
        (lambda path: shutil.rmtree(path.parent), False),
        (lambda path: path.rename(path.with_name("elsewhere")), False),
        (lambda path: (path.parent.rename(path.parent.with_name("moved")), path.parent.write_text("a file")), False),
    ],
)
def test_a_path_is_in_place_only_with_its_open_file(
    tmp_path: Path, change: Callable[[Path], object], expected: bool
) -> None:
    path = tmp_path / "directory" / "file"
    path.parent.mkdir()
    path.write_text("one")
    handle = os.open(path, os.O_RDONLY)
    change(path)
    assert is_in_place(handle, path) is expected
    os.close(handle)


def test_a_directory_that_was_made_again_is_a_loss_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    watched = WatchedPath(path)
    assert not watched.was_lost()  # The file never existed.
    path.mkdir()
    assert not watched.was_lost()
    path.rmdir()
    path.mkdir()
    assert watched.was_lost()
    assert not watched.was_lost()
    path.rmdir()
    assert watched.was_lost()
    assert not watched.was_lost()
    watched.close()


def test_losses_are_reported_for_a_while() -> None:
    now = [1_700_000_000.0]
    removals = RecentRemovals(lambda: now[0])
    text = removals.record("/run/metrics", "its records are lost")
    assert text == "/run/metrics was removed from outside at 22:13:20 UTC: its records are lost"
    now[0] += REPORT_S - 1.0
    removals.record("/run/events", "what was stored is lost")
    assert removals.texts == (text, "/run/events was removed from outside at 22:23:19 UTC: what was stored is lost")
    now[0] += 2.0
    assert removals.texts == ("/run/events was removed from outside at 22:23:19 UTC: what was stored is lost",)


def test_temporary_name_is_recognized_and_unique() -> None:
    names = {temporary_name("COMMIT") for _ in range(50)}
    assert len(names) == 50
    assert all(map(is_temporary_name, names))
    assert not any(map(is_temporary_name, ["COMMIT", ".metadata", ".COMMIT.tmp", ".COMMIT.0123456z.tmp", "..tmp"]))


def test_file_system_may_lack_the_sync_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with(number: int) -> None:
        def fail(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)

    for number in (errno.EINVAL, errno.ENOTSUP):
        fail_with(number)
        sync_directory(tmp_path)
    fail_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)
