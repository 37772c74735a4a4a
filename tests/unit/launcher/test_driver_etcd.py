"""Real drivers on a real etcd: two candidates, one dies, the other continues from the records."""

from __future__ import annotations

import base64
import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import HostPhase, HostRecord, RankFailure
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Halt, JobEnd, Round
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import Credentials, EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.driver.state import Seen
from megatrain_launcher.driver.writes import trims_of
from tests.helpers.driver_candidates import KEYS, NOW, CandidateHosts, DriverCandidate
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers, enable_users, post
from tests.helpers.waiting import wait_until


def test_a_standby_driver_continues_after_a_driver_dies(etcd: EtcdServers, tmp_path: Path) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        candidates = [DriverCandidate(etcd, name, tmp_path / "incidents") for name in ("one", "two")]
        for candidate in candidates:
            stack.callback(candidate.close)
        hosts = CandidateHosts(client)
        first = hosts.wait_for(Round, KEYS.round(1))
        assert [part.host for part in first.hosts] == ["host-0", "host-1"]
        leader, other = sorted(candidates, key=lambda candidate: not candidate.driver.is_leading)
        assert (leader.driver.is_leading, other.driver.is_leading) == (True, False)
        assert first.driver == leader.name
        hosts.train(1)
        wait_until(lambda: "round 1 trains on 2 hosts" in leader.driver.reason, "the driver to see it")

        leader.die()
        # As etcd does when a lease expires, without waiting for that.
        client.revoke_lease(leader.keeper.lease_id)
        hosts.say(0, HostPhase.FAILED, 1, min_step=12, failures=(RankFailure(0, -9, NOW),))
        halt = hosts.wait_for(Halt, KEYS.halt(1))
        assert other.driver.is_leading
        for host in range(2):
            hosts.say(host, HostPhase.STOPPED, 1, min_step=12)
        second = hosts.wait_for(Round, KEYS.round(2))
        assert (second.driver, second.incident) == (other.name, halt.incident)
        hosts.train(2)
        wait_until(lambda: hosts.incident().state is IncidentState.RECOVERED, "the incident's end")
        assert (hosts.incident().last_step, hosts.incident().steps_lost) == (12, 7)
        path = tmp_path / "incidents" / f"{halt.incident}.json"
        # The driver writes its files in another thread.
        wait_until(
            lambda: path.exists() and decode(Incident, path.read_bytes(), "file") == hosts.incident(), "the file"
        )
        wait_until(
            lambda: (found := hosts.read(DriverReport, KEYS.report)) is not None
            and (found.driver, found.reason) == (other.name, "round 2 trains on 2 hosts"),
            "the report",
        )  # fmt: skip

        client.put(KEYS.request("q"), encode(JobRequest("q", RequestKind.STOP, "me@here")))
        hosts.wait_for(Halt, KEYS.halt(2))
        for host in range(2):
            hosts.say(host, HostPhase.DONE, 2, exit_code=75)
        assert hosts.wait_for(JobEnd, KEYS.end).exit_code == 0
        assert hosts.wait_for(Answer, KEYS.answer("q")).is_done
        assert client.get(KEYS.request("q")) is None


@pytest.mark.slow(kept=["True"])
@pytest.mark.parametrize("is_dead", [True, False])
def test_dead_driver_is_followed_before_its_lease_ends(etcd: EtcdServers, tmp_path: Path, is_dead: bool) -> None:
    """Both leases are valid for longer than the test. A silent port proves nothing."""
    with ExitStack() as stack:
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        client.delete(KeyRange.prefix(KEYS.prefix))
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = DriverCandidate(etcd, "first", tmp_path)
        stack.callback(first.close)
        wait_until(lambda: first.driver.is_leading, "the first driver")
        record = HostRecord("first", "s", 1, "127.0.0.1", 1, port.getsockname()[1], 1, "", "", "", NOW, is_fit=True)
        client.put(KEYS.host("first"), encode(record), lease_id=first.keeper.lease_id)
        second = DriverCandidate(etcd, "second", tmp_path)
        stack.callback(second.close)
        lease_id = first.keeper.lease_id
        for _ in range(2):  # The first driver connects to it once, the second one every second.
            with port.accept()[0] as asking:
                asking.sendall(b"s\n")
        first.die()
        if is_dead:
            port.close()
            wait_until(lambda: second.driver.is_leading, "the second driver")
            assert client.get(KEYS.host("first")) is None
        else:
            for _ in range(3):  # the number of requests
                port.accept()[0].close()
            assert not second.driver.is_leading
            client.revoke_lease(lease_id)


def test_halt_without_a_cause_changes_nothing(etcd: EtcdServers, tmp_path: Path) -> None:
    """A proxy holds the halt until its driver has abandoned it, read the state again, and found no cause."""
    halt_key = base64.b64encode(KEYS.halt(1).encode())
    trains = "round 1 trains on 2 hosts"
    with ExitStack() as stack:
        proxy = stack.enter_context(EtcdProxy(etcd.members[0].client_port))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        client.delete(KeyRange.prefix(KEYS.prefix))
        one = DriverCandidate(etcd, "one", tmp_path, EtcdSettings.of([proxy.url]))
        stack.callback(one.close)
        hosts = CandidateHosts(client)
        hosts.wait_for(Round, KEYS.round(1))
        hosts.train(1)

        def is_reported() -> bool:
            report = hosts.read(DriverReport, KEYS.report)
            return report is not None and report.reason == one.driver.reason == trains

        # From then on the driver has nothing more to write.
        wait_until(is_reported, "the driver to see it")
        proxy.keeps_back = lambda request: b"/v3/kv/txn" in request and halt_key in request
        hosts.say(0, HostPhase.FAILED, 1)
        wait_until(lambda: proxy.kept, "the halt")
        hosts.train(1)
        wait_until(lambda: one.driver.is_leading and is_reported(), "the driver to read the state again")
        proxy.deliver()
        assert hosts.read(Halt, KEYS.halt(1)) is None


def test_old_keys_are_trimmed() -> None:
    names = [KEYS.round(n) for n in range(1, 61)] + [KEYS.halt(n) for n in range(1, 60)]
    names += [KEYS.evidence(5, f"host-{n}") for n in range(1250)]
    names += [KEYS.evidence(60, "host-1"), KEYS.host("host-1"), KEYS.end, "/other/key"]
    names += [KEYS.command(n) for n in range(1, 53)]
    # The driver of the newest records had a slow clock: their ids come first.
    names += [KEYS.incident(f"2026-{n:05d}") for n in range(505)] + [KEYS.incident(f"1970-{n}") for n in range(2)]
    # foreign names, which would be the newest
    names += [f"{KEYS.directory('rounds')}zz{n}" for n in range(60)] + [f"{KEYS.directory('commands')}9"]
    present = {name: Seen(revision, revision, 0.0, 0.0) for revision, name in enumerate(names, 1)}
    deleted = {trim.keys.start.decode() for trim in trims_of(KEYS, present)}
    assert deleted == {
        *(KEYS.round(n) for n in range(1, 11)),
        *(KEYS.halt(n) for n in range(1, 11)),
        KEYS.evidence(5, ""),
        *(KEYS.command(n) for n in (1, 2)),
        *(KEYS.incident(f"2026-{n:05d}") for n in range(7)),
    }


def test_a_candidacy_without_a_lease_blocks_no_driver(etcd: EtcdServers, tmp_path: Path) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        strays = [f"{KEYS.election}/{name}" for name in ("0", "ffff", "")]
        for stray in strays:
            client.put(stray, "stray")
        one = DriverCandidate(etcd, "one", tmp_path)
        stack.callback(one.close)
        wait_until(lambda: one.driver.is_leading, "a driver")
        wait_until(lambda: all(client.get(stray) is None for stray in strays), "the strays' end")
        assert one.driver.is_leading


@pytest.mark.slow
def test_candidate_that_is_refused_lets_another_drive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its user may use the keys of the election, and no other keys of the job."""
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers(tmp_path))
        enable_users(etcd.urls[0], "root password", {"one": "password"}, f"{KEYS.election}/")

        def start(name: str, credentials: Credentials) -> DriverCandidate:
            settings = EtcdSettings.of(etcd.urls, credentials=credentials)
            found = DriverCandidate(etcd, name, tmp_path / "incidents", settings)
            stack.callback(found.close)
            return found

        one = start("one", Credentials("one", "password"))
        wait_until(lambda: "driver one was refused by etcd" in caplog.text, "the refusal")
        assert "permission denied" in caplog.text
        two = start("two", Credentials("root", "root password"))
        wait_until(lambda: two.driver.is_leading, "the other one to drive")
        assert not one.driver.is_leading


def test_history_that_went_back_is_noticed(etcd: EtcdServers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A proxy answers the driver's first read of the job as an etcd that was restored to a state before the
    election."""
    read = b'"%s"' % base64.b64encode(KEYS.prefix.encode())
    header = post(etcd.urls[0], "/v3/maintenance/status", {})["header"]
    restored = json.dumps({"header": {**header, "revision": "1"}}).encode()
    is_first = iter([True])
    with ExitStack() as stack:
        proxy = stack.enter_context(EtcdProxy(etcd.members[0].client_port))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        client.delete(KeyRange.prefix(KEYS.prefix))
        proxy.corrupts = lambda request: b"/v3/kv/range" in request and read in request and next(is_first, False)
        proxy.garbage = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(restored), restored]
        proxy.conduct = Conduct.GARBAGE
        one = DriverCandidate(etcd, "one", tmp_path, EtcdSettings.of([proxy.url]))
        stack.callback(one.close)
        assert CandidateHosts(client).wait_for(Round, KEYS.round(1)).driver == "one"
    assert proxy.num_corrupted == 1
    assert caplog.text.count("etcd was restored to an older state; everything is read again") == 1
