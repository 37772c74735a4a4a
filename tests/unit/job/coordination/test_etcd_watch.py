"""Watches deliver each revision once and in order despite faults, and the whole range again if history was
compacted."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator

import pytest

from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.maintenance import compact
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import Watch, WatchLimits
from megatrain_job.coordination.watch_event import ChangeKind, Changes, Snapshot, WatchEvent
from megatrain_job.coordination.wire import Delete, KeyRange, Put
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.fake_gateway import FakeGateway
from tests.helpers.waiting import DEADLINE_S, wait_until

_QUICK = WatchLimits(silence_s=0.2)


def take(watch: Watch) -> WatchEvent:
    event = watch.next(DEADLINE_S)
    assert event is not None, watch.problem
    return event


def take_snapshot(watch: Watch) -> Snapshot:
    event = take(watch)
    assert isinstance(event, Snapshot)
    return event


def revisions(watch: Watch, last: int) -> list[int]:
    """Receive changes up to revision `last`."""
    found: list[int] = []
    while not found or found[-1] < last:
        event = take(watch)
        assert isinstance(event, Changes)
        found.append(event.revision)
    return found


def write_some(client: EtcdClient, prefix: str, randomness: random.Random, count: int) -> int:
    """Write `count` revisions, all below the prefix: puts, deletes and transactions. Return the last one."""
    last = 0
    for number in range(count):
        key = f"{prefix}{randomness.randrange(4)}"
        if randomness.random() < 0.3:
            last = client.txn([], [Put(key, str(number)), Delete(KeyRange.key(f"{prefix}other"))]).revision
        else:
            last = client.put(key, str(number))
    return last


@pytest.fixture
def fake() -> Iterator[FakeGateway]:
    with FakeGateway() as gateway:
        yield gateway


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("watched")) as servers:
        yield servers


@pytest.fixture
def own(mortal: EtcdServers) -> EtcdServers:
    """An etcd that a test may kill; while the test runs, all its revisions are of keys below w/."""
    with EtcdClient(EtcdSettings.of(mortal.urls)) as client:
        client.delete(KeyRange.prefix("w/"))
    return mortal


def test_watch_begins_with_what_is_there_and_goes_on(client: EtcdClient, prefix: str) -> None:
    client.put(prefix + "a", "1")
    client.put(prefix[:-1] + "0", "outside")
    with Watch(client, KeyRange.prefix(prefix)) as watch:
        snapshot = take_snapshot(watch)
        assert [(item.key, item.value) for item in snapshot.items] == [(f"{prefix}a".encode(), b"1")]

        put = client.put(prefix + "b", "2")
        deleted = client.delete(prefix + "a").revision

        first, second = take(watch), take(watch)
        assert isinstance(first, Changes)
        assert isinstance(second, Changes)
        assert (first.revision, second.revision) == (put, deleted)
        assert (first.changes[0].kind, first.changes[0].item.value) == (ChangeKind.PUT, b"2")
        assert (second.changes[0].kind, second.changes[0].item.key) == (ChangeKind.DELETE, f"{prefix}a".encode())
        assert watch.next(0.0) is None
        assert watch.problem == ""


def test_transaction_is_one_event(client: EtcdClient, prefix: str) -> None:
    with Watch(client, KeyRange.prefix(prefix)) as watch:
        take_snapshot(watch)
        client.txn([], [Put(f"{prefix}{number}", "") for number in range(5)])

        event = take(watch)

        assert isinstance(event, Changes)
        assert len(event.changes) == 5


def test_close_ends_a_watch_whose_queue_is_full(client: EtcdClient, prefix: str) -> None:
    watch = Watch(client, KeyRange.prefix(prefix), limits=WatchLimits(capacity=1))
    write_some(client, prefix, random.Random(2), 10)
    watch.close()
    watch.close()

    assert not watch.is_open
    assert len(list(watch)) <= 1


def test_close_of_the_client_ends_its_watches(etcd: EtcdServers, prefix: str) -> None:
    client = EtcdClient(EtcdSettings.of(etcd.urls))
    watch = Watch(client, KeyRange.prefix(prefix))
    take_snapshot(watch)
    client.close()

    assert watch.next(DEADLINE_S) is None
    wait_until(lambda: not watch.is_open, "the watch to end")
    watch.close()


def test_killed_and_restarted_etcd_loses_and_doubles_nothing(own: EtcdServers) -> None:
    randomness = random.Random(3)
    with EtcdClient(EtcdSettings.of(own.urls)) as client:
        start = client.put("w/0", "")
        with Watch(client, KeyRange.prefix("w/"), start_revision=start) as watch:
            last = 0
            for _ in range(2):
                write_some(client, "w/", randomness, 30)
                # A single etcd before 3.5.5 may lose its last acknowledged write (etcd issue 14370): here a lease.
                # One before 3.5.3 may lose any write since its database was committed (etcd issue 13766).
                num_commits = own.members[0].num_commits()
                client.grant_lease(60)
                wait_until(lambda: own.members[0].num_commits() > num_commits, "etcd to commit its database")  # noqa: B023
                own.members[0].kill()
                own.members[0].start()
                # A put is repeated until etcd is available.
                client.put("w/back", "")
                last = write_some(client, "w/", randomness, 30)

            assert revisions(watch, last) == list(range(start, last + 1))


@pytest.mark.slow(kept=["0"])
@pytest.mark.parametrize("seed", range(2))
def test_connections_cut_anywhere_lose_and_double_nothing(own: EtcdServers, seed: int) -> None:
    """The oracle is etcd's numbering: all keys are watched, so each revision must arrive exactly once."""
    randomness = random.Random(seed)
    with (
        EtcdClient(EtcdSettings.of(own.urls)) as writer,
        EtcdProxy(own.members[0].client_port, budget=lambda: randomness.randrange(200, 6000)) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
    ):
        start = writer.put("w/0", "")
        with Watch(client, KeyRange.prefix("w/"), start_revision=start) as watch:
            found, last = [], 0
            while proxy.num_connections <= 6:  # a difficult case
                # A larger message, which etcd creates from a backlog, would not pass through any of these connections.
                last = write_some(writer, "w/", randomness, 10)
                found += revisions(watch, last)

            assert found == list(range(start, last + 1))


@pytest.mark.slow
def test_watched_state_survives_cuts_and_compaction(own: EtcdServers) -> None:
    randomness = random.Random(4)
    with (
        EtcdClient(EtcdSettings.of(own.urls)) as writer,
        EtcdProxy(own.members[0].client_port, budget=lambda: randomness.randrange(300, 6000)) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix("w/"), limits=WatchLimits(capacity=2)) as watch,
    ):
        state: dict[bytes, bytes] = {}
        seen = num_snapshots = 0
        for _ in range(12):
            last = write_some(writer, "w/", randomness, 8)
            if randomness.random() < 0.6:
                compact(writer, last)
            while seen < last:
                event = take(watch)
                assert event.revision > seen or isinstance(event, Snapshot)
                seen = event.revision
                if isinstance(event, Snapshot):
                    num_snapshots += 1
                    state = {item.key: item.value for item in event.items}
                    continue
                for change in event.changes:
                    if change.kind is ChangeKind.PUT:
                        state[change.item.key] = change.item.value
                    else:
                        state.pop(change.item.key, None)
            assert state == {item.key: item.value for item in writer.read_all(KeyRange.prefix("w/")).items}
        assert num_snapshots > 1


def test_compaction_behind_a_broken_watch_gives_a_snapshot(own: EtcdServers) -> None:
    with (
        EtcdClient(EtcdSettings.of(own.urls)) as writer,
        EtcdProxy(own.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix("w/")) as watch,
    ):
        take_snapshot(watch)
        proxy.conduct = Conduct.REFUSE
        proxy.cut()
        wait_until(lambda: watch.problem != "", "the watch to notice")
        writer.put("w/a", "1")
        compact(writer, writer.put("w/a", "2"))
        proxy.conduct = Conduct.PASS

        snapshot = take_snapshot(watch)
        assert [item.value for item in snapshot.items] == [b"2"]
        assert "no history before revision" in snapshot.reason
        assert revisions(watch, writer.put("w/a", "3")) == [snapshot.revision + 1]
        assert watch.problem == ""


def test_progress_notification_advances_an_idle_watch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All events are outside the range, and the history before the newest one is compacted."""
    often = ["--experimental-watch-progress-notify-interval", "100ms"]
    with (
        EtcdServers(tmp_path_factory.mktemp("progress"), arguments=often) as servers,
        EtcdClient(EtcdSettings.of(servers.urls)) as writer,
        EtcdProxy(servers.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix("idle/")) as watch,
    ):
        take_snapshot(watch)
        last = write_some(writer, "busy/", random.Random(6), 20)
        wait_until(lambda: watch.next_revision == last + 1, "a progress notification")
        compact(writer, last)
        proxy.cut()
        written = writer.put("idle/a", "")

        assert revisions(watch, written) == [written]


def test_earlier_changes_are_not_reported_again(fake: FakeGateway) -> None:
    """etcd does not repeat them, but a watch does not rely on that. Messages are as etcd 3.6 writes them, two in one
    packet."""
    header = {"cluster_id": "1", "member_id": "2", "revision": "7"}
    events = [{"kv": {"key": "YQ==", "mod_revision": str(revision)}} for revision in (4, 5, 6, 7)]
    created = {"result": {"header": header, "created": True}}
    fake.answers["/v3/kv/range"] = [{"header": header}]
    fake.answers["/v3/watch"] = [
        created, {"result": {"header": header, "events": events[:2]}},
        {"result": {"header": header, "events": events[1:]}}, {"error": {"code": 14, "message": "bye"}},
    ]  # fmt: skip
    with EtcdClient(EtcdSettings.of(fake.url)) as client, Watch(client, KeyRange.key("a"), start_revision=5) as watch:
        assert revisions(watch, 7) == [5, 6, 7]
        wait_until(lambda: "bye" in watch.problem, "the end of the stream")
        assert watch.next(0.0) is None


@pytest.mark.slow
def test_history_that_went_back_gives_a_snapshot(own: EtcdServers) -> None:
    with EtcdClient(EtcdSettings.of(own.urls)) as client, Watch(client, KeyRange.prefix("w/")) as watch:
        take_snapshot(watch)
        revisions(watch, write_some(client, "w/", random.Random(5), 10))
        member = own.members[0]
        member.kill()
        shutil.rmtree(member.directory / member.name)
        member.start()

        snapshot = take_snapshot(watch)

        assert "went back" in snapshot.reason
        assert snapshot.items == ()


def test_stream_without_data_is_replaced(own: EtcdServers) -> None:
    """The proxy keeps the stream open and sends nothing, while new connections work: only a timeout detects this."""
    with (
        EtcdClient(EtcdSettings.of(own.urls)) as writer,
        EtcdProxy(own.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix("w/"), limits=WatchLimits(silence_s=0.2, renew_s=0.6)) as watch,
    ):
        snapshot = take_snapshot(watch)
        revisions(watch, writer.put("w/a", ""))
        proxy.conduct = Conduct.SWALLOW
        missed = writer.put("w/a", "while the watch was cut")
        proxy.conduct = Conduct.PASS

        assert missed == snapshot.revision + 2
        assert revisions(watch, missed) == [missed]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_silent_watch_of_a_dead_member_is_moved(
    is_frozen: bool, tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServers
) -> None:
    """Two proxies to one etcd; the one that the watch uses stops forwarding without an error."""
    port = etcd.members[0].client_port
    with EtcdProxy(port) as first, EtcdProxy(port) as second:
        proxies = {first.url: first, second.url: second}
        settings = EtcdSettings.of([first.url, second.url], attempt_s=0.5)
        with (
            EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
            EtcdClient(settings) as client,
            Watch(client, KeyRange.prefix("dark/"), limits=_QUICK) as watch,
        ):
            snapshot = take_snapshot(watch)
            assert revisions(watch, writer.put("dark/a", "")) == [snapshot.revision + 1]
            used = proxies[str(client.gateway.ring.best())]
            used.conduct = Conduct.SWALLOW if is_frozen else Conduct.REFUSE
            if not is_frozen:
                used.cut()
            written = writer.put("dark/a", "")

            assert revisions(watch, written) == [written]


def test_failed_call_wakes_the_watches_of_that_member(etcd: EtcdServers) -> None:
    """A watch of a frozen member receives nothing; the first failed call to that member notifies the watch long before
    its own limit."""
    port = etcd.members[0].client_port
    with EtcdProxy(port) as first, EtcdProxy(port) as second:
        proxies = {first.url: first, second.url: second}
        settings = EtcdSettings.of([first.url, second.url], attempt_s=0.3)
        patient = WatchLimits(silence_s=600.0, renew_s=600.0)
        with EtcdClient(settings) as client, Watch(client, KeyRange.prefix("frozen/"), limits=patient) as watch:
            take_snapshot(watch)
            revisions(watch, client.put("frozen/a", ""))
            proxies[str(client.gateway.ring.best())].conduct = Conduct.SWALLOW

            written = client.put("frozen/a", "by the other way")

            # A put whose answer is late is repeated, so there may be more than one.
            assert revisions(watch, written)[-1] == written


def answers_of_a_stream(*messages: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + b"\n".join(messages) + b"\n"


@pytest.mark.slow(kept=["ssh", "bad event", "canceled"])
@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>",
        answers_of_a_stream(b"{}"),
        answers_of_a_stream(b'{"result":{"created":true}}', b'{"result":{"events":[{"kv":{"key":"%%"}}]}}'),
        answers_of_a_stream(b'{"result":{"created":true}}', b'{"result":{"events":[1]}}'),
        answers_of_a_stream(b'{"result":{"canceled":true,"cancel_reason":"mvcc: watcher is slow"}}'),
    ],
    ids=["ssh", "bad gateway", "empty", "bad event", "number", "canceled"],
)
def test_watch_survives_garbage(etcd: EtcdServers, garbage: bytes, prefix: str) -> None:
    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix)) as watch,
    ):
        take_snapshot(watch)
        proxy.garbage, proxy.conduct = [garbage], Conduct.GARBAGE
        proxy.cut()
        wait_until(lambda: watch.problem != "", "the watch to notice")
        written = writer.put(prefix + "a", "")
        proxy.conduct = Conduct.PASS

        assert revisions(watch, written) == [written]


def test_endless_errors_cost_few_connections(etcd: EtcdServers, prefix: str) -> None:
    """A proxy that cuts every stream after its first message must not make the watch reconnect without a pause."""
    with (
        EtcdProxy(etcd.members[0].client_port, budget=lambda: 300) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix), start_revision=1_000_000) as watch,
    ):
        assert watch.next(0.5) is None
        assert proxy.num_connections < 15
