"""Removed files of the job's own etcd: they are restored unchanged, and no etcd begins empty."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.processes import process_state
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.maintenance import compact
from megatrain_job.coordination.settings import Credentials, EtcdSettings
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.wire import KeyRange
from megatrain_job.jobs.own_etcd import read_own_etcd
from megatrain_launcher.etcd.data import HeldFiles, frozen
from megatrain_launcher.etcd.process import EtcdProcess
from megatrain_launcher.etcd.program import lack_of_space, last_errors
from megatrain_launcher.launch.job_files import JobFiles
from tests.helpers.etcd_server import etcd_program, user_names
from tests.helpers.other_user import readable_by_all
from tests.helpers.waiting import DEADLINE_S, wait_until

OWN = Credentials("megatrain", "secret")


@pytest.fixture(scope="module")
def program() -> Path:
    return Path(etcd_program())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that does not exist yet, in a place that every user may read."""
    return readable_by_all(tmp_path) / "own"


def test_child_that_is_suspended_late_is_awaited() -> None:
    """The kernel suspends a process only after its threads left system calls that cannot be interrupted."""

    class LateChild:
        """A child that runs during the first two checks, like this process, and is suspended afterwards."""

        def __init__(self, child: ChildProcess) -> None:
            self._child, self._checks = child, iter([os.getpid(), os.getpid()])
            self.send = child.send

        @property
        def pid(self) -> int:
            return next(self._checks, self._child.pid)

    with ChildProcess(["sleep", "1000"]) as child:
        with frozen(cast(ChildProcess, LateChild(child))):
            assert process_state(child.pid) == "T"
        wait_until(lambda: process_state(child.pid) == "S", "the child to continue")


@dataclass(frozen=True)
class EtcdContent:
    """A key, the cluster and the users of an etcd."""

    value: bytes | None
    revisions: tuple[int, int]
    lease_id: int
    cluster_id: str
    users: list[str]

    @classmethod
    def by(cls, client: EtcdClient) -> EtcdContent:
        item = client.get("key", deadline_s=DEADLINE_S)
        assert item is not None
        revisions = item.create_revision, item.mod_revision
        return cls(item.value, revisions, item.lease_id, client.gateway.cluster_id, user_names(client))


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_data_and_etcd(etcd: EtcdProcess, place: Path) -> None:
    """Remove the data, and kill etcd before the loss can be noticed."""
    assert etcd.pid is not None
    shutil.rmtree(place)
    os.kill(etcd.pid, signal.SIGKILL)


def put_another_in_its_place(etcd: EtcdProcess, place: Path) -> None:
    place.rename(place.with_name("moved"))
    place.mkdir(mode=0o700)
    (place / "etcd").mkdir(mode=0o700)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remove", "named", "is_shared"),
    [
        (lambda etcd, place: shutil.rmtree(place), "etcd/member/snap/db", False),
        (lambda etcd, place: shutil.rmtree(place), "etcd/member/snap/db", True),
        (lambda etcd, place: empty(place), "lock", True),
        (lambda etcd, place: shutil.rmtree(place / "etcd"), "etcd/member/snap/db", True),
        (lambda etcd, place: shutil.rmtree(place / "etcd" / "member" / "wal"), ".wal", True),
        (remove_data_and_etcd, "etcd/member/snap/db", True),
        (put_another_in_its_place, "etcd/member/snap/db", True),
        (lambda etcd, place: (place / "endpoint").unlink(), "endpoint", True),
    ],
)
def test_removed_files_are_restored_without_loss(
    place: Path, program: Path, remove: Callable[[EtcdProcess, Path], object], named: str, is_shared: bool
) -> None:
    """An etcd with a removed data directory would answer writes, and the next start would have none of them."""
    files = JobFiles(place.parent)
    place = files.directory
    where = {"address": "127.0.0.1", "tls": files.tls} if is_shared else {}
    credentials = files.credentials()
    with (
        EtcdProcess(place, credentials, program=program, **where) as etcd,
        files.published(etcd, "job", "launch"),
        EtcdClient(etcd.settings) as client,
        Watch(client, KeyRange.key("key")) as watch,
    ):
        names = {path.name for path in place.iterdir()}
        lease = client.grant_lease(600)
        client.put("key", "first")
        client.put("key", "value", lease_id=lease.lease_id)
        before = EtcdContent.by(client)

        remove(etcd, place)
        wait_until(lambda: bool(etcd.problems), "the report of the loss")

        assert EtcdContent.by(client) == before
        assert client.renew_lease(lease.lease_id, deadline_s=DEADLINE_S) == 600
        (text,) = etcd.problems
        assert text.startswith(f"{place} (")
        assert named in text
        assert names <= {path.name for path in place.iterdir()}
        assert read_own_etcd(files.run).settings == etcd.settings
        client.put("key", "after", lease_id=lease.lease_id)
        wait_until(lambda: has_seen(watch, b"after"), "the watch to continue")
        with pytest.raises(ConfigError, match="still runs"), EtcdProcess(place, credentials, program=program):
            pass
    # It is on disk, not only in memory.
    with EtcdProcess(place, credentials, program=program) as etcd, EtcdClient(etcd.settings) as client:
        assert EtcdContent.by(client).value == b"after"
        assert EtcdContent.by(client).cluster_id == before.cluster_id


def has_seen(watch: Watch, value: bytes) -> bool:
    event = watch.next(0.05)
    return event is not None and any(item.value == value for item in event.written)


@pytest.mark.slow
def test_removed_socket_is_created_again(tmp_path: Path, program: Path) -> None:
    """Programs that clean /tmp remove it after some days."""
    with EtcdProcess(tmp_path / ("x" * 100), OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        client.put("key", "value")
        shutil.rmtree(Path(etcd.settings.endpoints[0].path).parent)
        wait_until(lambda: bool(etcd.problems), "the report of the loss")
        with EtcdClient(etcd.settings) as other:
            item = other.get("key", deadline_s=DEADLINE_S)
        assert item is not None
        assert item.value == b"value"


@pytest.mark.slow
def test_etcd_serves_while_its_directory_cannot_be_restored(tmp_path: Path, program: Path) -> None:
    """No process of it is stopped before there is a copy."""
    real, root, other = tmp_path / "real", tmp_path / "run", tmp_path / "other"
    real.mkdir()
    root.symlink_to(real)
    (tmp_path / "file").touch()
    with EtcdProcess(root / ("x" * 100), OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        client.put("key", "value")
        pid = etcd.pid
        other.symlink_to(tmp_path / "file")
        other.replace(root)
        wait_until(lambda: bool(etcd.problems), "the problem")
        assert "cannot be put back" in etcd.problems[0]
        client.put("key", "another")
        assert etcd.pid == pid

        shutil.rmtree(real)
        real.mkdir()
        other.symlink_to(real)
        other.replace(root)
        wait_until(lambda: "cannot be put back" not in etcd.problems[0], "the end of the problem")
        assert EtcdContent.by(client).value == b"another"
        assert etcd.pid != pid
    with EtcdProcess(root / ("x" * 100), OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        assert EtcdContent.by(client).value == b"another"


@pytest.mark.slow
def test_files_that_etcd_itself_replaces_are_no_loss(place: Path, program: Path) -> None:
    with EtcdProcess(place, OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        for number in range(50):
            client.put("key", str(number) * 1000)
        compact(client, client.put("key", "value"))
        pid = etcd.pid
        before = (place / "etcd" / "member" / "snap" / "db").stat().st_ino
        client.gateway.call("/v3/maintenance/defragment", {}, bool, what="defragmentation", deadline_s=DEADLINE_S)
        assert (place / "etcd" / "member" / "snap" / "db").stat().st_ino != before
        held = HeldFiles(place / "etcd")
        assert held.poll(pid) == ()
        held.close()
        shutil.rmtree(place / "etcd")
        wait_until(lambda: bool(etcd.problems), "the report of the loss")
        assert EtcdContent.by(client).value == b"value"


@pytest.mark.slow
def test_etcd_with_lost_unlocked_files_does_not_start_afresh(
    place: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty etcd would have no password, and count rounds from 1, below those that have claimed the run."""
    monkeypatch.setattr(HeldFiles, "poll", lambda held, pid: ())
    with EtcdProcess(place, OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        client.put("key", "value")
        pid = etcd.pid
        assert pid is not None
        shutil.rmtree(place / "etcd")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "cannot fetch cluster info" in etcd.log.read_text(), "the next one to give up")
        with EtcdClient(EtcdSettings(etcd.settings.endpoints)) as stranger, pytest.raises(CoordinationError):
            stranger.put("key", "mine", deadline_s=0.05)


WARNING = json.dumps({"level": "warn", "msg": "simple token is not cryptographically signed"})
PANIC = json.dumps({"level": "panic", "msg": "failed to create WAL", "error": "no space left", "stacktrace": "raft.go"})
NINE = "\n".join(json.dumps({"level": "error", "msg": f"problem {number}"}) for number in range(9))


def test_last_errors_of_a_log_are_those_of_etcd() -> None:
    for text, expected in [
        (f"{WARNING}\n{PANIC}\npanic: failed\n\ngoroutine 1 [running]:\n", "failed to create WAL: no space left"),
        (NINE, "problem 6\nproblem 7\nproblem 8"),
        # without an error of etcd, the end of the log
        (f"{WARNING}\n", WARNING),
        ("{\n[1]\nan older etcd is on fire\n", "{\n[1]\nan older etcd is on fire"),
        (f"{PANIC[:-1]}\n", PANIC[:-1]),
        ("x" * 3000, "x" * 2000),
    ]:
        assert last_errors(text) == expected, (text, expected)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lack_of_space(tmp_path / "missing") == ""
    for free, expected in ((2**30, ""), (3 * 2**20, "its disk has 3.15 MB left, and etcd needs 67.1 MB to begin")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert lack_of_space(tmp_path).startswith(expected)
        assert bool(lack_of_space(tmp_path)) is bool(expected)
