"""Files where every user may write, and file systems without locks or hard links: what is used, what is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.contracts.files.file_locks import give_name, is_locked, lock, wait_and_lock, wait_and_share
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, make_own_directory, open_own_file
from tests.helpers.other_user import OTHER_USER, as_other_user, everybodys_place
from tests.helpers.preloaded import compiled
from tests.helpers.source_tree import ROOT


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    return everybodys_place(tmp_path)


def test_our_directory_is_ours_alone(everybodys: Path) -> None:
    own = everybodys / "own"
    with pytest.raises(FileNotFoundError):
        check_own_directory(own)
    make_own_directory(own)
    make_own_directory(own)
    check_own_directory(own)
    assert own.stat().st_mode & 0o777 == 0o700
    (own / "file").write_bytes(b"content")
    with open(open_own_file(own / "file", os.O_RDONLY), "rb") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path: path.mkdir(mode=0o755), f"belongs to user {OTHER_USER}, and this is user {os.geteuid()}"),
        (lambda path: path.mkdir(mode=0o700), f"belongs to user {OTHER_USER}"),
        (lambda path: path.symlink_to("/"), "is a symbolic link"),
        (lambda path: path.write_bytes(b""), "is not a directory"),
    ],
)
def test_a_directory_that_another_user_made_first_is_refused(
    everybodys: Path, put: Callable[[Path], None], reason: str
) -> None:
    own = everybodys / "own"
    as_other_user(lambda: put(own))
    make_own_directory(own)
    with pytest.raises(NotOwnError, match=reason):
        check_own_directory(own)


def test_a_directory_that_others_may_enter_is_refused(everybodys: Path) -> None:
    own = everybodys / "own"
    own.mkdir(mode=0o755)
    with pytest.raises(NotOwnError, match="has mode 755, expected 700"):
        check_own_directory(own)


def test_directory_that_others_may_replace_is_refused(everybodys: Path) -> None:
    everybodys.chmod(0o777)
    with pytest.raises(NotOwnError, match=r"every user may replace files in it \(mode 777, not sticky\)"):
        make_own_directory(everybodys / "own")
    assert not (everybodys / "own").exists()


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path: path.write_bytes(b"believe me"), f"belongs to user {OTHER_USER}"),
        (lambda path: path.symlink_to("/etc/hostname"), "is a symbolic link"),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_a_file_of_another_user_is_refused_and_never_waited_for(
    everybodys: Path, put: Callable[[Path], None], reason: str
) -> None:
    as_other_user(lambda: put(everybodys / "file"))
    with pytest.raises(NotOwnError, match=reason):
        open_own_file(everybodys / "file", os.O_RDONLY)
    if "belongs" in reason:
        os.close(open_own_file(everybodys / "file", os.O_RDONLY, (OTHER_USER,)))


PROGRAM = """
import logging, sys
from contextlib import suppress
from pathlib import Path
from megatrain.run_files.action_log import ActionEntry, ActionLog
from megatrain.contracts.errors import ConfigError
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.run_files.run_directory import RunDirectory
from megatrain.contracts.files.whole_files import write_private
from megatrain.data.build import DATA_DIRECTORY
from megatrain.contracts.files.new_directory import new_directory
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_launcher.etcd.place import take_lock

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
run = Path(sys.argv[1])
directory = RunDirectory(run)
directory.create()
with directory.locked(None) as lock:
    print(lock.lock.note)
    assert directory.holder() is None
with SegmentStore(run / "events") as store:
    store.commit()
ActionLog(run / "actions.jsonl").append(ActionEntry(1.0, "intent", "1", "", "me", "operator", "", "stop", "", ""))
assert not ActionLog(run / "actions.jsonl").trail().problem
place = LocalLocation(run / "COMMIT")
assert place.write_new(b"first") and not place.write_new(b"second") and place.read() == b"first"
assert not LocalLocation(run).is_exclusive()
write_private(run / "password", b"x", is_new=True)
with suppress(FileExistsError):
    write_private(run / "password", b"y", is_new=True)
    raise SystemExit("written twice")
assert (run / "password").read_bytes() == b"x"
with new_directory(run / "data", DATA_DIRECTORY, False) as built:
    (built / "meta.json").write_text("{}")
try:
    take_lock(run / "coordination")
except ConfigError as error:
    print(error)
"""


def test_file_system_without_locks_or_links_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)],
        env={**os.environ, "LD_PRELOAD": str(compiled("no_locks.c", "no_locks.so")), "NO_LOCKS_BELOW": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    why = "cannot be locked (Function not implemented): the file system has no locks, so nothing keeps"
    assert done.stdout.splitlines()[:2] == [
        f"WARNING: {run}/lock {why} another job out of this directory; make sure that only one job has it",
        f"WARNING {run}/events/lock {why} a second daemon from writing events there",
    ]
    needed = f"{run}/coordination/lock cannot be locked (Function not implemented): the file system has no file locks"
    assert f"{needed}, and the job's etcd needs them; " in done.stdout
    assert "set job.run_directory to a directory on a file system with locks, or name an etcd (" in done.stdout


def refuse(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EINVAL"])
def test_each_error_of_a_missing_lock_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    number = getattr(errno, name)
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    with (tmp_path / "lock").open("w") as file:
        for take in (lock, wait_and_lock, wait_and_share):
            assert take(file.fileno()) == os.strerror(number)
        assert is_locked(file.fileno()) is None


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EMLINK", "EINVAL"])
def test_each_error_of_a_missing_link_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "link", refuse(getattr(errno, name)))
    for content, is_new in ((b"first", True), (b"second", False)):
        (tmp_path / "temporary").write_bytes(content)
        assert give_name(tmp_path / "temporary", tmp_path / "name") is is_new
    assert (tmp_path / "name").read_bytes() == b"first"


def test_other_errors_of_locks_and_links_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(errno.EIO))
    monkeypatch.setattr(os, "link", refuse(errno.EIO))
    with (tmp_path / "lock").open("w") as file, pytest.raises(OSError, match="Input/output error"):
        lock(file.fileno())
    with pytest.raises(OSError, match="Input/output error"):
        give_name(tmp_path / "lock", tmp_path / "name")
