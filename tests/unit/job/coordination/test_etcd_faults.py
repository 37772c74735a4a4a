"""Members that die, freeze and return, and proxies that falsify traffic: calls continue within seconds, or fail with a
clear reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Election
from megatrain_job.coordination.errors import UnknownOutcomeError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.maintenance import status
from megatrain_job.coordination.settings import Endpoint, EtcdSettings
from megatrain_job.coordination.watch import Watch, WatchLimits
from megatrain_job.coordination.watch_event import Changes, Snapshot
from megatrain_job.coordination.wire import Compare, KeyRange, Put
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdMember, EtcdServers
from tests.helpers.set_clock import SetClock
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("cluster"), num_members=3) as servers:
        yield servers


def client_of(
    servers: EtcdServers, first: EtcdMember, *, attempt_s: float = 3.0, call_s: float = DEADLINE_S
) -> EtcdClient:
    """Return a client that tries `first` first. Its calls have time to wait for another leader."""
    client = EtcdClient(EtcdSettings.of(servers.urls, attempt_s=attempt_s, call_s=call_s))
    ring = client.gateway.ring
    for endpoint in client.settings.endpoints:
        ring.succeeded(endpoint) if str(endpoint) == first.url else ring.failed(endpoint)
    return client


def bring_back(servers: EtcdServers, member: EtcdMember, *, was_killed: bool) -> None:
    if was_killed:
        member.start()
    else:
        member.thaw()
    servers.wait_ready()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "is_leader"), [("kill", True), ("freeze", True), ("freeze", False)])
def test_calls_go_on_through_another_member(cluster: EtcdServers, fault: str, is_leader: bool) -> None:
    """The member that serves everything of a client is killed: puts, lease, watch and leadership survive."""
    leader = cluster.leader()
    victim = leader if is_leader else next(member for member in cluster.members if member is not leader)
    limits = WatchLimits(silence_s=0.5)
    with client_of(cluster, victim) as client, LeaseKeeper(client, ttl_s=5, period_s=0.3) as keeper:
        leadership = Election(client, "faults/driver").campaign(keeper, "me")
        assert leadership is not None
        first = client.put("faults/a", "0")
        with Watch(client, KeyRange.key("faults/a"), start_revision=first, limits=limits) as watch:
            assert isinstance(watch.next(DEADLINE_S), Changes)
            written = []
            victim.kill() if fault == "kill" else victim.freeze()
            try:
                written += [client.put("faults/a", "x") for _ in range(20)]
                leadership.txn([Put("faults/round", "1")])
            finally:
                bring_back(cluster, victim, was_killed=fault == "kill")
            written.append(client.put("faults/a", "last"))
            seen: list[int] = []
            while not seen or seen[-1] < written[-1]:
                event = watch.next(DEADLINE_S)
                assert isinstance(event, Changes), watch.problem
                seen.append(event.revision)

        assert len(seen) == len(set(seen))
        assert set(written) <= set(seen)
        assert keeper.state is LeaseState.HELD


@pytest.mark.slow
def test_etcd_without_majority_neither_writes_nor_reads_stale(cluster: EtcdServers) -> None:
    lone, *others = cluster.members
    # one try at each member fits into 2 s
    with client_of(cluster, lone) as client, client_of(cluster, lone, attempt_s=0.5, call_s=2.0) as impatient:
        client.put("faults/b", "1")
        for member in others:
            member.kill()
        try:
            for call in (lambda: impatient.put("faults/b", "2"), lambda: impatient.get("faults/b")):
                with pytest.raises(CoordinationError, match=r"within 2\.0 s") as caught:
                    call()
                assert len(caught.value.endpoints) == 3
        finally:
            for member in others:
                member.start()
            cluster.wait_ready()
        client.put("faults/b", "3")


@pytest.mark.slow
def test_watch_at_a_member_without_majority_moves_to_the_others(cluster: EtcdServers) -> None:
    """A member that lost contact with the others serves watches as if it were healthy; it cannot give the requested
    proof."""
    leader = cluster.leader()
    isolated = next(member for member in cluster.members if member is not leader)
    rest = [member for member in cluster.members if member is not isolated]
    with (
        client_of(cluster, isolated, attempt_s=0.7) as client,
        client_of(cluster, rest[0]) as writer,
        Watch(client, KeyRange.key("faults/c"), limits=WatchLimits(silence_s=0.3)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        # Those two are stopped, the isolated member keeps the watch; then it is stopped, and they return with new
        # events.
        for member in rest:
            member.kill()
        try:
            wait_until(lambda: watch.problem != "", "the watch to ask for proof")
            assert watch.next(0.0) is None
        finally:
            isolated.freeze()
            for member in rest:
                member.start()
        try:
            written = writer.put("faults/c", "news")
            event = watch.next(DEADLINE_S)
            assert isinstance(event, Changes)
            # A put whose answer is late is repeated.
            assert event.revision <= written
        finally:
            isolated.thaw()
            cluster.wait_ready()


def proxied(etcd: EtcdServers) -> EtcdProxy:
    return EtcdProxy(etcd.members[0].client_port)


@pytest.mark.slow(kept=["Conduct.GARBAGE-not HTTP"])
@pytest.mark.parametrize(
    ("conduct", "reason"),
    [
        (Conduct.REFUSE, "closed|reset"),
        (Conduct.SWALLOW, "no answer"),
        (Conduct.GARBAGE, "not HTTP"),
        (Conduct.HALF_ANSWER, "in the middle of an answer"),
        (Conduct.DRIP, "no answer"),
    ],
)
def test_faulty_endpoint_is_skipped_or_named(etcd: EtcdServers, prefix: str, conduct: Conduct, reason: str) -> None:
    limit_s = 0.1 if reason == "no answer" else DEADLINE_S
    with proxied(etcd) as bad, proxied(etcd) as good:
        bad.conduct = conduct
        with EtcdClient(EtcdSettings.of(bad.url, attempt_s=limit_s, call_s=0.5)) as client:
            # The proxy never gives a better answer. The last of a call's tries may have too little time for the reason.
            with pytest.raises(CoordinationError, match=f"{bad.url}: .*({reason})"):
                status(client, client.settings.endpoints[0])
            with pytest.raises(CoordinationError, match=f"within 0.5 s: .*{bad.url} \\(") as caught:
                client.get(prefix + "a")
            assert "applied" not in str(caught.value)
            assert caught.value.endpoints == (bad.url,)
        with EtcdClient(EtcdSettings.of([bad.url, good.url], attempt_s=0.3, call_s=DEADLINE_S)) as client:
            for _ in range(3):
                client.put(prefix + "a", "x")
            assert str(client.gateway.ring.best()) == good.url


@pytest.mark.parametrize(
    ("conduct", "reason"), [(Conduct.REFUSE, "closed|reset"), (Conduct.GARBAGE, "not HTTP")], ids=["refuses", "garbage"]
)
def test_error_of_an_ordinary_call_has_the_reason(
    etcd: EtcdServers, prefix: str, conduct: Conduct, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    monkeypatch.setattr("megatrain_job.coordination.transport.time", clock)
    with proxied(etcd) as bad, EtcdClient(EtcdSettings.of(bad.url, attempt_s=DEADLINE_S, call_s=DEADLINE_S)) as client:
        record_failure = client.gateway.record_failure

        def record_and_let_time_pass(endpoint: Endpoint, text: str, *, is_alive: bool = False) -> None:
            record_failure(endpoint, text, is_alive=is_alive)
            clock.now += 0.4 * DEADLINE_S

        # Time passes only between tries, so the last one has enough of it too.
        monkeypatch.setattr(client.gateway, "record_failure", record_and_let_time_pass)
        bad.conduct = conduct
        with pytest.raises(CoordinationError, match=rf"read .*: no answer from etcd .*{bad.url} \(.*({reason})"):
            client.get(prefix + "a")
        assert bad.num_connections == 3


@pytest.mark.slow(kept=['{"header":{"cluster_id":1}}', "", "<html>504</html>"])
@pytest.mark.parametrize(
    "body",
    [
        b"<html>504</html>", b"", b"[]", b"{}", b'{"kvs":[]}', b'{"header":{}}', b'{"header":{"cluster_id":1}}',
        b'{"header":{"cluster_id":"1"},"kvs":[{"key":7}]}', b'{"header":{"cluster_id":"1"},"kvs":7}',
        b'{"header":{"cluster_id":"1","revision":"x"}}',
    ],
)  # fmt: skip
def test_foreign_answer_is_not_taken_for_an_empty_one(etcd: EtcdServers, prefix: str, body: bytes) -> None:
    with proxied(etcd) as bad, EtcdClient(EtcdSettings.of(bad.url, call_s=0.15)) as client:
        bad.conduct = Conduct.GARBAGE
        bad.garbage = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]
        with pytest.raises(CoordinationError, match="answer"):
            client.get(prefix + "a")


def test_write_with_unknown_outcome_is_not_repeated(etcd: EtcdServers, client: EtcdClient, prefix: str) -> None:
    key = prefix + "a"
    with proxied(etcd) as proxy, EtcdClient(EtcdSettings.of(proxy.url)) as one:
        proxy.conduct = Conduct.HALF_ANSWER
        with pytest.raises(
            UnknownOutcomeError, match=f"transaction on '{key}': sent to .* may have been applied"
        ) as caught:
            one.txn([], [Put(key, "mine")])
        assert caught.value.may_have_applied
        assert caught.value.key == f"'{key}'"
    item = client.get(key)
    assert item is not None
    assert (item.value, item.create_revision) == (b"mine", item.mod_revision), "it was sent once"


def test_write_that_never_left_may_be_repeated(etcd: EtcdServers, prefix: str) -> None:
    with proxied(etcd) as dead, EtcdClient(EtcdSettings.of([dead.url, *etcd.urls])) as client:
        dead.close()
        for number in range(4):
            key = f"{prefix}{number}"
            assert client.txn([Compare.is_absent(key)], [Put(key, "")]).succeeded


def test_repeatable_put_is_repeated(etcd: EtcdServers, prefix: str) -> None:
    with proxied(etcd) as bad, proxied(etcd) as good, EtcdClient(EtcdSettings.of([bad.url, good.url])) as client:
        bad.conduct = Conduct.HALF_ANSWER
        for number in range(3):
            client.put(f"{prefix}{number}", str(number))

        assert len(client.read_all(KeyRange.prefix(prefix)).items) == 3


def test_connection_closed_while_idle_fails_no_call(etcd: EtcdServers, prefix: str) -> None:
    """The server may close an idle connection. The next transaction has a known outcome even then."""
    with proxied(etcd) as proxy, EtcdClient(EtcdSettings.of(proxy.url)) as client:
        for number in range(5):
            key = f"{prefix}{number}"
            assert client.txn([Compare.is_absent(key)], [Put(key, "")]).succeeded
            proxy.cut()
        assert proxy.num_connections >= 4


def test_connections_are_kept(etcd: EtcdServers, prefix: str) -> None:
    with proxied(etcd) as proxy, EtcdClient(EtcdSettings.of(proxy.url)) as client:
        for _ in range(20):
            client.put(prefix + "a", "")

        assert proxy.num_connections == 1


def test_close_wakes_calls_and_watches_under_way(etcd: EtcdServers, prefix: str) -> None:
    with proxied(etcd) as proxy:
        client = EtcdClient(EtcdSettings.of(proxy.url, attempt_s=3600.0, call_s=3600.0))
        client.put(prefix + "a", "")
        proxy.conduct = Conduct.SWALLOW
        errors: list[str] = []

        def call() -> None:
            try:
                client.get(prefix + "a")
            except CoordinationError as error:
                errors.append(str(error))

        caller = threading.Thread(target=call)
        caller.start()
        watch = Watch(client, KeyRange.prefix(prefix))
        client.close()
        watch.close()
        caller.join()

        assert len(errors) == 1
        assert "closed" in errors[0]
