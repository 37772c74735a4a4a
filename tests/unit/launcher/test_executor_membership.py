"""A host's membership in a job, on a real etcd: names in use, lost leases, and lost etcds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError, CoordinationError, CoordinationRefusedError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import HangEvidence, HostPhase, HostRecord, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import JobEnd, Round, RoundHost
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseState
from megatrain_job.coordination.own_keys import OwnKeys
from megatrain_job.coordination.settings import Credentials, EtcdSettings
from megatrain_job.coordination.wire import KeyRange, Put
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.job_record import claim_job, read_job
from megatrain_launcher.executor.membership import FitnessCheck, Membership
from megatrain_launcher.executor.order_state import OrderState
from megatrain_launcher.executor.status_writer import StatusWriter
from megatrain_launcher.liveness import LivenessPort
from tests.helpers.etcd_server import EtcdServers, enable_users
from tests.helpers.ports import free_ports
from tests.helpers.registered_host import a_host, a_job
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as one:
        yield one


def registered(client: EtcdClient, keys: JobKeys) -> HostRecord | None:
    item = client.get(keys.host("a"))
    return None if item is None else decode(HostRecord, item.value, keys.host("a"))


def test_a_registered_host_is_there_until_it_closes(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    one = member(a_host())
    assert registered(client, keys) == a_host()
    assert one.is_registered
    assert one.set_unfit_reason(FitnessCheck.HEALTH, "no disk")
    assert not one.lease().is_gone  # while the key is being rewritten
    wait_until(lambda: registered(client, keys) == one.record, "the change")
    assert one.record.unfit_reason == "no disk"
    one.close()
    assert registered(client, keys) is None


@pytest.mark.parametrize("is_empty", [True, False])
def test_host_does_not_return_to_an_etcd_without_the_job(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership], is_empty: bool
) -> None:
    """Its rounds would begin with 1, below those that have claimed the run; the same for another job with this name."""
    client.put(keys.record, encode(a_job(keys, "a")))
    one = member(a_host())
    client.delete(KeyRange.prefix(keys.prefix))
    if not is_empty:
        client.put(keys.record, encode(a_job(keys, "b")))
    client.revoke_lease(one.keeper.lease_id)
    wait_until(lambda: "etcd was emptied, or restored to an older state" in one.problem, "the problem")
    assert registered(client, keys) is None


def test_host_is_fit_when_no_check_objects(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    """Registered as unfit until its checks are done; then no orders arrive. Neither check overrules the other."""
    one = member(a_host(is_fit=False, unfit_reason="its checks are running"))
    cases = [
        (FitnessCheck.ORDERS, "no orders", True, (False, "its checks are running; no orders")),
        (FitnessCheck.HEALTH, "", True, (False, "no orders")),
        (FitnessCheck.HEALTH, "", False, (False, "no orders")),
        (FitnessCheck.HEALTH, "no disk", True, (False, "no disk; no orders")),
        (FitnessCheck.ORDERS, "", True, (False, "no disk")),
        (FitnessCheck.HEALTH, "", True, (True, "")),
    ]
    for check, reason, is_news, expected in cases:
        assert one.set_unfit_reason(check, reason) is is_news
        assert one.unfit_reason(check) == reason
        assert (one.record.is_fit, one.record.unfit_reason) == expected
    wait_until(lambda: registered(client, keys) == a_host(), "the host to be fit")


def test_a_lost_lease_is_replaced_under_the_same_session(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    one = member(a_host())
    lost = one.keeper
    client.revoke_lease(lost.lease_id)
    assert registered(client, keys) is None
    wait_until(lambda: one.keeper is not lost and one.is_registered, "a new lease")
    assert registered(client, keys) == a_host()
    assert not one.lease().is_gone


def test_a_lease_is_gone_since_it_ran_out_or_was_lost(client: EtcdClient, keys: JobKeys) -> None:
    """It does not depend on when the lease was last read: a round may begin at that moment."""
    for state, valid_s, gone_s in [
        (LeaseState.HELD, 3.0, -3.0),
        (LeaseState.DOUBTFUL, -2.0, 2.0),
        (LeaseState.LOST, -2.0, 2.0),  # It expired before etcd reported it.
        (LeaseState.LOST, 3.0, 0.0),  # It was revoked early: it counts as gone from now on.
    ]:
        membership: Any = Membership(client, keys, ttl_s=10, renew_s=0.2)
        membership._keeper = membership._keeper_of_key = SimpleNamespace(state=LeaseState.HELD, valid_s=3.0)
        assert membership.lease().gone_s == -3.0, (state, valid_s, gone_s)
        membership._keeper.state, membership._keeper.valid_s = state, valid_s
        assert membership.lease().gone_s == pytest.approx(gone_s, abs=0.5), (state, valid_s, gone_s)


@pytest.mark.slow
def test_an_etcd_that_comes_back_finds_the_host_as_it_was(tmp_path: Path, keys: JobKeys) -> None:
    with EtcdServers(tmp_path) as servers, EtcdClient(EtcdSettings.of(servers.urls)) as one:
        membership = Membership(one, keys, ttl_s=2, renew_s=0.2)
        membership.register(a_host())
        servers.members[0].kill()
        wait_until(lambda: membership.lease().is_gone, "the lease to be in doubt")
        servers.members[0].start()
        servers.wait_ready()
        wait_until(lambda: not membership.lease().is_gone, "the lease to be valid again")
        assert registered(one, keys) == a_host()
        membership.close()


def test_a_second_executor_of_the_same_name_is_refused(keys: JobKeys, member: Callable[..., Membership]) -> None:
    port = LivenessPort("1", "127.0.0.1")
    member(a_host(liveness_port=port.port))
    with pytest.raises(ConfigError, match=r"host 'a': job .* has a live executor .*hosts/a.* --host-id") as error:
        # The first keeps its lease, and the second does not wait for its end.
        member(a_host(session="2", liveness_port=1, pid=1), ttl_s=3600)
    assert str(os.getpid()) in str(error.value)
    port.close()


def test_dead_local_executor_is_replaced_at_once(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    (unused_port,) = free_ports(1)
    lease = client.grant_lease(60)
    client.put(keys.host("a"), encode(a_host(session="0", liveness_port=unused_port, pid=1)), lease_id=lease.lease_id)
    member(a_host())
    assert registered(client, keys) == a_host()


def test_lease_of_a_silent_remote_executor_is_awaited(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    far = a_host(session="0", address="192.0.2.1", pid=1)
    lease = client.grant_lease(60)
    client.put(keys.host("a"), encode(far), lease_id=lease.lease_id)
    late = threading.Timer(0.3, client.revoke_lease, (lease.lease_id,))
    late.start()
    member(a_host())
    assert registered(client, keys) == a_host()
    late.join()


def test_executor_replaced_while_away_leaves(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    one = member(a_host())
    other = a_host(session="2", pid=1, liveness_port=7, address="192.0.2.1")
    client.put(keys.host("a"), encode(other))
    client.revoke_lease(one.keeper.lease_id)
    wait_until(lambda: bool(one.replaced), "the host to notice")
    assert "another executor (process 1 at 192.0.2.1)" in one.replaced
    assert registered(client, keys) == other


def test_own_key_with_an_ending_lease_replaces_no_host(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    port = LivenessPort("1", "127.0.0.1")
    one = member(a_host(liveness_port=port.port))
    lost = one.keeper
    # As if etcd reported the lease as lost a moment before it removes the keys.
    client.put(keys.host("a"), encode(one.record))
    client.revoke_lease(lost.lease_id)
    wait_until(lambda: "this host's key still exists under the lost lease" in one.problem, "the host to notice")
    assert one.replaced == ""
    client.delete(keys.host("a"))
    wait_until(lambda: one.is_registered, "the host to be registered again")
    assert registered(client, keys) == one.record
    port.close()


def test_status_is_written_although_evidence_is_refused(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = OwnKeys.put

    def refuse_evidence(own: OwnKeys, key: str, *args: Any, **more: Any) -> None:
        if "/evidence/" in key:
            raise CoordinationError("etcdserver: request is too large")
        put(own, key, *args, **more)

    monkeypatch.setattr(OwnKeys, "put", refuse_evidence)
    one, state = member(a_host()), HostStatusBuilder("a")
    orders = OrderState(keys, "a", "1")
    writer = StatusWriter(client, keys, one, lambda: state.status("1", orders.view(), ""), 60.0)
    writer.add_evidence(HangEvidence("a", "1", 3, 1.0, {}, ()))
    wait_until(lambda: client.get(keys.status("a")) is not None, "the status")
    assert client.get(keys.evidence(3, "a")) is None
    monkeypatch.undo()
    wait_until(lambda: client.get(keys.evidence(3, "a")) is not None, "the evidence, at last")
    writer.close()


def test_status_is_written_after_its_evidence(
    client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]
) -> None:
    one, state = member(a_host()), HostStatusBuilder("a")
    orders = OrderState(keys, "a", "1")
    built: list[str] = []

    def build() -> HostStatus:
        built.append("" if client.get(keys.evidence(3, "a")) is None else "evidence")
        return state.status("1", orders.view(), "")

    def status() -> HostStatus | None:
        item = client.get(keys.status("a"))
        return None if item is None else decode(HostStatus, item.value, "status")

    writer = StatusWriter(client, keys, one, build, 60.0)
    writer.wake()
    wait_until(lambda: status() is not None, "the first status")
    found = status()
    assert found is not None
    assert (found.phase, found.round) == (HostPhase.PARKED, 0)
    state.set_completed_command(4)
    writer.add_evidence(HangEvidence("a", "1", 3, 1.0, {}, ()))
    wait_until(lambda: getattr(status(), "completed_command", 0) == 4, "the second one")
    assert built[-1] == "evidence"
    lost = one.keeper
    client.revoke_lease(lost.lease_id)
    assert status() is None
    wait_until(lambda: one.keeper is not lost and one.is_registered, "a new lease")
    writer.wake()
    wait_until(lambda: status() is not None, "the status under it")
    writer.close()


def test_fenced_host_starts_a_new_session(client: EtcdClient, keys: JobKeys, member: Callable[..., Membership]) -> None:
    one = member(a_host())
    with OrderState(keys, "a", "1") as orders:
        orders.follow(client)
        assignments: list[object] = []

        def agent() -> None:
            number = 0
            while (assignment := orders.next_assignment(number)) is not None:
                assignments.append(assignment)
                number = assignment.round.number

        thread = threading.Thread(target=agent)
        thread.start()
        parts = (RoundHost("a", "1", "127.0.0.1", 0, 2),)
        client.put(keys.round(1), encode(Round(1, 2, parts, "127.0.0.1", 1, "begin", "d", 0.0)))
        wait_until(lambda: len(assignments) == 1, "the first round")
        others = (RoundHost("b", "1", "127.0.0.1", 0, 2),)
        client.put(keys.round(2), encode(Round(2, 2, others, "127.0.0.1", 1, "without a", "d", 0.0)))
        wait_until(lambda: orders.begin_session("2"), "the new life")
        one.begin_session("2")
        wait_until(lambda: registered(client, keys) == one.record, "the new session")
        assert one.record.session == "2"
        again = (RoundHost("a", "2", "127.0.0.1", 0, 2),)
        client.put(keys.round(3), encode(Round(3, 2, again, "127.0.0.1", 1, "with a", "d", 0.0)))
        wait_until(lambda: len(assignments) == 2, "the third round")
        client.put(keys.end, encode(JobEnd(0, "done", 0.0)))
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert orders.problem == ""


def test_foreign_key_among_the_hosts_blocks_no_host(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.host("junk"), b"{")
    first = claim_job(client, keys, a_job(keys, "a", "L"), 1.0)
    assert claim_job(client, keys, a_job(keys, "b", "L"), 1.0) == first
    assert read_job(client, keys).hosts == ()
    lease = client.grant_lease(60)
    client.put(keys.host("newer"), b'{"schema_version": 2}', lease_id=lease.lease_id)  # This test keeps its lease.
    with pytest.raises(CoordinationError, match=r"hosts/newer: schema_version=2"):
        claim_job(client, keys, a_job(keys, "b", "L"), 1.0)


def test_starting_host_does_not_read_all_hosts(client: EtcdClient, keys: JobKeys) -> None:
    client.txn([], [Put(keys.host(f"h{number}"), encode(a_host(f"h{number}"))) for number in range(70)])
    assert len(read_job(client, keys).hosts) == 64


@pytest.mark.slow
def test_wrong_credentials_and_an_unreachable_etcd_are_named(tmp_path: Path, keys: JobKeys) -> None:
    with EtcdServers(tmp_path) as servers:
        enable_users(servers.urls[0], "root's", {"trainer": "right"}, "/megatrain/")
        wrong = EtcdSettings.of(servers.urls, credentials=Credentials("trainer", "wrong"))
        with EtcdClient(wrong) as client, pytest.raises(CoordinationRefusedError, match="trainer") as refused:
            claim_job(client, keys, a_job(keys, "a"), 1.0)
        assert refused.value.exit_code is ExitCode.NO_PERMISSION
        url = servers.urls[0]
    away = EtcdSettings.of([url], attempt_s=0.2, call_s=0.5)
    with EtcdClient(away) as client, pytest.raises(CoordinationError, match=url):
        claim_job(client, keys, a_job(keys, "a"), 1.0)
