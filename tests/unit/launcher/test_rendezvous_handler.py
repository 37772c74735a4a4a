"""Agents' handlers on a real etcd: rounds, deaths, joins, lost leases, and errors where no round is possible."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.process import ROUND_VARIABLE
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import Delete, KeyRange
from megatrain_launcher.rendezvous import leader, torchrun_handler
from megatrain_launcher.rendezvous.handler import MegatrainRendezvous
from megatrain_launcher.rendezvous.settings import read_settings
from tests.helpers.etcd_server import EtcdServers, enable_users
from tests.helpers.ports import free_ports
from tests.helpers.waiting import DEADLINE_S, wait_until

_numbers = itertools.count()


@pytest.fixture
def run_id() -> str:
    return f"job-{next(_numbers)}"


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ROUND_VARIABLE, "0")  # restored at the end
    monkeypatch.setattr("megatrain_launcher.rendezvous.handler._LINGER_S", 0.1)
    yield
    assert not [one.name for one in threading.enumerate() if one.name.startswith(("etcd ", "rendezvous"))]


class HandlerAgents:
    """Handlers as agents use them; each waits for its round in a thread."""

    def __init__(self, url: str, run_id: str, min_nodes: int, max_nodes: int, **options: object) -> None:
        self.parameters = (url, run_id, min_nodes, max_nodes)
        self.options = {"ttl": "2", "renew": "0.3", "last_call_timeout": "0.2", "join_timeout": "15", **options}
        self.handlers: list[MegatrainRendezvous] = []
        self.threads = ThreadPoolExecutor()

    def new(self, **options: object) -> MegatrainRendezvous:
        parameters = RendezvousParameters("megatrain", *self.parameters, **{**self.options, **options})
        handler = get_rendezvous_handler(parameters)
        assert isinstance(handler, MegatrainRendezvous)
        self.handlers.append(handler)
        return handler

    def ask(self, *handlers: MegatrainRendezvous) -> list[Future[RendezvousInfo]]:
        return [self.threads.submit(handler.next_rendezvous) for handler in handlers]

    def meet(self, *handlers: MegatrainRendezvous) -> list[RendezvousInfo]:
        """Let all handlers wait for a round, and return the results."""
        return [future.result(DEADLINE_S) for future in self.ask(*handlers)]

    def end(self) -> None:
        for handler in self.handlers:
            handler.shutdown()
        self.threads.shutdown()


@contextmanager
def agents(
    etcd: EtcdServers, run_id: str, min_nodes: int, max_nodes: int, **options: object
) -> Iterator[HandlerAgents]:
    found = HandlerAgents(etcd.urls[0], run_id, min_nodes, max_nodes, **options)
    try:
        yield found
    finally:
        found.end()


def is_over(handler: MegatrainRendezvous) -> Callable[[], bool]:
    return lambda: handler.num_nodes_waiting() == 1


def lease_of(handler: MegatrainRendezvous) -> LeaseKeeper:
    assert handler._membership is not None
    assert handler._membership.keeper is not None
    return handler._membership.keeper


def ports(infos: list[RendezvousInfo]) -> set[int]:
    return {info.bootstrap_store_info.master_port for info in infos}


def test_two_agents_meet_and_meet_again(etcd: EtcdServers, run_id: str) -> None:
    with agents(etcd, run_id, 2, 2) as job:
        one, other = job.new(), job.new()
        assert (one.get_backend(), one.get_run_id(), one.use_agent_store) == ("megatrain", run_id, True)
        assert one.num_nodes_waiting() == 0
        first = job.meet(one, other)

        assert sorted(info.rank for info in first) == [0, 1]
        assert {info.world_size for info in first} == {2}
        assert len(ports(first)) == 1
        first[0].store.set("left", "by round 1")
        assert first[1].store.get("left") == b"by round 1"
        assert [one.num_nodes_waiting(), other.num_nodes_waiting()] == [0, 0]
        assert os.environ[ROUND_VARIABLE] == "1"

        # The workers of one have died: it requests a round, and the other is informed.
        (asking,) = job.ask(one)
        wait_until(is_over(other), "the other agent to be informed")
        assert not asking.done()
        (of_other,) = job.meet(other)
        second = [asking.result(DEADLINE_S), of_other]

        assert [info.rank for info in second] == [info.rank for info in first]
        assert {info.world_size for info in second} == {2}
        assert ports(second) != ports(first)
        assert not second[0].store.check(["left"])
        assert os.environ[ROUND_VARIABLE] == "2"


def test_an_agent_that_leaves_is_replaced_by_one_that_waited(etcd: EtcdServers, run_id: str) -> None:
    with agents(etcd, run_id, 2, 2) as job:
        trio = [job.new() for _ in range(3)]
        waiting = job.ask(*trio)
        wait_until(lambda: sum(future.done() for future in waiting) == 2, "a round of two")
        (spare,) = [number for number in range(3) if not waiting[number].done()]
        gone, stays = [number for number in range(3) if number != spare]
        assert trio[stays].num_nodes_waiting() == 0
        rank = waiting[stays].result().rank

        trio[gone].shutdown()
        wait_until(is_over(trio[stays]), "the survivor to be informed")
        (again,) = job.meet(trio[stays])

        taken = waiting[spare].result(DEADLINE_S)
        assert {again.rank, taken.rank} == {0, 1}
        assert again.rank == rank


def test_a_third_agent_joins_where_max_nodes_allows_it(etcd: EtcdServers, run_id: str) -> None:
    with agents(etcd, run_id, 2, 3) as job:
        one, other = job.new(), job.new()
        assert {info.world_size for info in job.meet(one, other)} == {2}
        (third,) = job.ask(job.new())
        wait_until(is_over(one), "one of them to be informed")
        wait_until(is_over(other), "the other to be informed")

        infos = [*job.meet(one, other), third.result(DEADLINE_S)]

        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}


def test_lost_lease_is_replaced(etcd: EtcdServers, run_id: str) -> None:
    """As after an etcd outage that was longer than the TTL: the round continues, or a new one is formed."""
    with agents(etcd, run_id, 1, 1) as job, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        one = job.new()
        job.meet(one)
        key = one._settings.keys.host(one._membership.host)  # type: ignore[union-attr]
        before = client.get(key)
        assert before is not None

        client.revoke_lease(before.lease_id)

        def is_back() -> bool:
            now = client.get(key)
            return now is not None and now.lease_id != before.lease_id

        wait_until(is_back, "the key to exist again")
        after = client.get(key)
        assert after is not None
        assert after.value == before.value
        # There was no leader meanwhile, and the new one gives the others time to return.
        assert one.num_nodes_waiting() == 0


@pytest.mark.slow
def test_a_round_outlives_the_loss_of_all_leases(etcd: EtcdServers, run_id: str) -> None:
    """All leases are gone, including the leader's: the cause is etcd, and the next leader waits for the other hosts."""
    with agents(etcd, run_id, 2, 2) as job, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        # One has returned, and leads, before the other has noticed.
        pair = [job.new(ttl="4", renew="0.1"), job.new(ttl="4", renew="1.3")]
        job.meet(*pair)
        keys = JobKeys(f"rdzv-{run_id}")
        before = [lease_of(one) for one in pair]

        # etcd ends them one after another; neither of the two must see that.
        prefixes = [keys.directory(name) for name in ("hosts", "status", "driver")]
        client.txn([], [Delete(KeyRange.prefix(prefix)) for prefix in prefixes])
        for lease in before:
            client.revoke_lease(lease.lease_id)

        def are_back() -> bool:
            return all(lease_of(one) is not lease for one, lease in zip(pair, before, strict=True))

        wait_until(are_back, "both hosts to be registered again")
        assert [one.num_nodes_waiting() for one in pair] == [0, 0]
        # One of them leads.
        (asking,) = job.ask(pair[0])
        wait_until(is_over(pair[1]), "the other agent to be informed")
        job.meet(pair[1])
        assert asking.result(DEADLINE_S).world_size == 2
        assert os.environ[ROUND_VARIABLE] == "2"


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_named(
    etcd: EtcdServers, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain_launcher.rendezvous.handler._CONNECT_S", 0.3)
    with agents(etcd, run_id, 2, 2, join_timeout="1") as job:
        waiting = job.ask(*[job.new(local_addr="192.0.2.1") for _ in range(2)])
        errors = [future.exception(DEADLINE_S) for future in waiting]
    assert {type(error) for error in errors} == {RendezvousTimeoutError}
    assert any("store of" in str(error) for error in errors)


def test_closed_rendezvous_can_be_opened_again(etcd: EtcdServers, run_id: str) -> None:
    with agents(etcd, run_id, 1, 1) as job, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        one = job.new()
        job.meet(one)
        one.set_closed()
        assert not one.is_closed()
        assert one.shutdown()
        assert one.shutdown()
        keys = JobKeys(f"rdzv-{run_id}")
        assert not client.read_all(KeyRange.prefix(keys.directory("hosts"))).items
        assert not client.read_all(KeyRange.prefix(keys.election)).items

        later = job.new()
        (info,) = job.meet(later)

        assert (info.rank, info.world_size) == (0, 1)
        assert os.environ[ROUND_VARIABLE] == "2"


def test_old_rounds_are_forgotten(etcd: EtcdServers, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_launcher.rendezvous.leader._NUM_KEPT", 2)
    with agents(etcd, run_id, 1, 1) as job, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        one = job.new()
        for _ in range(5):
            job.meet(one)
        keys = JobKeys(f"rdzv-{run_id}")
        found = client.read_all(KeyRange.prefix(keys.directory("rounds"))).items
        assert [item.key.decode() for item in found] == [keys.round(number) for number in (3, 4, 5)]


def test_missing_hosts_are_named(etcd: EtcdServers, run_id: str) -> None:
    with agents(etcd, run_id, 2, 4, join_timeout="1") as job:
        one = job.new()
        with pytest.raises(
            RendezvousTimeoutError, match=r"no round of --nnodes=2:4 hosts was formed within 1 s: waiting: "
        ):
            one.next_rendezvous()


def test_other_nnodes_are_refused(etcd: EtcdServers, run_id: str) -> None:
    with agents(etcd, run_id, 2, 2) as job, agents(etcd, run_id, 1, 4) as strange:
        one = job.new()
        (waiting,) = job.ask(one)
        wait_until(lambda: one._membership is not None and bool(one._membership.view.records), "one")

        host = rf"{socket.gethostname()}-\d+-\w+"
        with pytest.raises(ConfigError, match=rf"--nnodes=1:4 on this host, 2:2 on {host} \(key '/megatrain/rdzv-"):
            strange.new().next_rendezvous()

        strange.handlers[0].shutdown()
        (info,) = job.meet(job.new())
        assert {info.rank, waiting.result(DEADLINE_S).rank} == {0, 1}


def test_unreadable_keys_are_reported_and_skipped(
    etcd: EtcdServers, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = JobKeys(f"rdzv-{run_id}")
    with agents(etcd, run_id, 1, 1) as job, EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        for key in (keys.round(1), keys.host("x"), f"{keys.directory('rounds')}{'9' * 5000}", f"{keys.election}/0"):
            client.put(key, "garbage")
        one = job.new()
        job.meet(one)
        assert os.environ[ROUND_VARIABLE] == "2"
        client.put(keys.halt(2), "garbage")
        wait_until(is_over(one), "the end of the round")
        job.meet(one)
        assert os.environ[ROUND_VARIABLE] == "3"
    assert f"{keys.round(1)}: not JSON" in caplog.text
    assert f"{keys.host('x')}: not JSON" in caplog.text


class MistakenHandler(logging.Handler):
    """Fails at the first round that a leader announces, because of an error in code that the leader calls."""

    is_mistaken = True

    def emit(self, record: logging.LogRecord) -> None:
        if self.is_mistaken and record.getMessage().startswith("rendezvous: round 1:"):
            self.is_mistaken = False
            raise KeyError("a mistake")


def test_failed_leader_is_replaced(etcd: EtcdServers, run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, leader.__name__)
    logger, handler = logging.getLogger(leader.__name__), MistakenHandler()
    logger.addHandler(handler)
    try:
        with agents(etcd, run_id, 1, 1) as job:
            (info,) = job.meet(job.new())
    finally:
        logger.removeHandler(handler)
    assert (info.world_size, handler.is_mistaken) == (1, False)
    assert "this leader failed" in caplog.text


def test_unreachable_etcd_is_a_connection_error(run_id: str) -> None:
    (port,) = free_ports(1)
    settings = read_settings(f"127.0.0.1:{port}", run_id, 1, 1, {}, environment={})
    handler = MegatrainRendezvous(replace(settings, etcd=replace(settings.etcd, call_s=0.5)))
    with pytest.raises(RendezvousConnectionError, match=rf"127\.0\.0\.1:{port}"):
        handler.next_rendezvous()
    handler.shutdown()


@pytest.mark.slow
def test_wrong_password_is_an_error_that_does_not_show_it(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "password").write_text("battery staple")
    (tmp_path / "right").write_text("correct horse")
    with EtcdServers(tmp_path) as guarded:
        enable_users(guarded.urls[0], "root password", {"bob": "correct horse"}, "/megatrain/")
        with agents(guarded, run_id, 1, 1, user="bob") as job:
            with pytest.raises(RendezvousConnectionError, match="as user 'bob'") as caught:
                job.new(password_file=str(tmp_path / "password")).next_rendezvous()
            assert "battery staple" not in str(caught.value)
            (info,) = job.meet(job.new(password_file=str(tmp_path / "right")))
            assert info.world_size == 1


def test_wrong_options_are_reported_when_the_handler_is_made(run_id: str) -> None:
    parameters = RendezvousParameters("megatrain", "h:1", run_id, 1, 1, color="blue")
    with pytest.raises(ConfigError, match="--rdzv-conf color: no such key"):
        torchrun_handler()(parameters)
