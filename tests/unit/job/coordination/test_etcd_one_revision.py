"""Reads in several calls are of one revision; no abandoned write is applied late; how long an answer is valid."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import FutureRevisionError, LeaseLostError, UnknownOutcomeError
from megatrain_job.coordination.maintenance import compact
from megatrain_job.coordination.own_keys import OwnKeys
from megatrain_job.coordination.settings import Credentials, EtcdSettings
from megatrain_job.coordination.watch import Watch, WatchLimits
from megatrain_job.coordination.watch_event import Changes, Snapshot
from megatrain_job.coordination.wire import KeyRange, Range
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers, post
from tests.helpers.set_clock import SetClock
from tests.helpers.waiting import DEADLINE_S, wait_until

Read = Callable[[EtcdClient, str], tuple[int, list[bytes]]]


@pytest.fixture
def proxy(etcd: EtcdServers) -> Iterator[EtcdProxy]:
    with EtcdProxy(etcd.members[0].client_port) as made:
        yield made


def before_page(proxy: EtcdProxy, number: int, act: Callable[[], object]) -> None:
    """Call a function between the pages of a read: page 0 is the first."""
    pages = itertools.count()

    def watch(request: bytes) -> None:
        if b"/v3/kv/range" in request and next(pages) == number:
            act()

    proxy.before = watch


def in_pages(client: EtcdClient, prefix: str) -> tuple[int, list[bytes]]:
    answer = client.read_all(KeyRange.prefix(prefix), page_keys=2)
    return answer.revision, [item.value for item in answer.items]


def as_ranges(client: EtcdClient, prefix: str) -> tuple[int, list[bytes]]:
    return _in_ranges(client, prefix, num_at_once=1)


def as_ranges_at_once(client: EtcdClient, prefix: str) -> tuple[int, list[bytes]]:
    return _in_ranges(client, prefix, num_at_once=3)


def _in_ranges(client: EtcdClient, prefix: str, num_at_once: int) -> tuple[int, list[bytes]]:
    parts = [KeyRange((prefix + start).encode(), (prefix + end).encode()) for start, end in ("02", "23", "34", "49")]
    answers = client.read_together([Range(keys) for keys in parts], num_at_once=num_at_once)
    return answers[0].revision, [item.value for answer in answers for item in answer.items]


in_each_way = pytest.mark.parametrize("read", [in_pages, as_ranges, as_ranges_at_once])


@in_each_way
def test_later_parts_do_not_see_what_is_written_between(
    client: EtcdClient, prefix: str, proxy: EtcdProxy, read: Read
) -> None:
    for number in range(4):
        last = client.put(f"{prefix}{number}", "old")
    before_page(proxy, 1, lambda: [client.put(f"{prefix}{number}", "new") for number in (3, 4)])

    with EtcdClient(EtcdSettings.of([proxy.url])) as reader:
        found = read(reader, prefix)

    assert client.get(f"{prefix}4") is not None
    assert found == (last, [b"old"] * 4)


@in_each_way
def test_parts_begin_again_when_their_revision_is_compacted(
    client: EtcdClient, prefix: str, proxy: EtcdProxy, read: Read
) -> None:
    for number in range(4):
        client.put(f"{prefix}{number}", "old")
    before_page(proxy, 1, lambda: compact(client, client.put(f"{prefix}4", "new")))

    with EtcdClient(EtcdSettings.of([proxy.url])) as reader:
        assert read(reader, prefix)[1] == [b"old"] * 4 + [b"new"]


def give_future_revisions(etcd: EtcdServers, proxy: EtcdProxy, count: int) -> None:
    """Give the first `count` reads without a revision one that etcd does not have, as if it was emptied since."""

    def is_first_part(request: bytes) -> bool:
        return b"/v3/kv/range" in request and b'"revision"' not in request and proxy.num_corrupted < count

    def make_answer(request: bytes) -> None:
        if is_first_part(request):
            answer = post(etcd.urls[0], "/v3/kv/range", json.loads(request.partition(b"\r\n\r\n")[2]))
            answer["header"]["revision"] = str(2**62)
            content = json.dumps(answer).encode()
            proxy.garbage = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)]

    proxy.before, proxy.corrupts, proxy.conduct = make_answer, is_first_part, Conduct.GARBAGE


@in_each_way
@pytest.mark.parametrize(("count", "is_read"), [(4, True), (5, False)])
def test_parts_begin_again_when_etcd_was_emptied(
    client: EtcdClient, etcd: EtcdServers, prefix: str, proxy: EtcdProxy, read: Read, count: int, is_read: bool
) -> None:
    for number in range(4):
        last = client.put(f"{prefix}{number}", "old")
    give_future_revisions(etcd, proxy, count)

    with EtcdClient(EtcdSettings.of([proxy.url])) as reader:
        if is_read:
            assert read(reader, prefix) == (last, [b"old"] * 4)
        else:
            with pytest.raises(FutureRevisionError, match="required revision is a future revision"):
                read(reader, prefix)
    assert proxy.num_corrupted == count


def test_revision_of_one_part_alone_is_refused(client: EtcdClient, prefix: str) -> None:
    part = Range(KeyRange.prefix(prefix))
    for parts in ([Range(part.keys, revision=1), part], [part, Range(part.keys, revision=1)]):
        with pytest.raises(ValueError, match="are at the newest revision; use `read` for another one"):
            client.read_together(parts)


def test_abandoned_write_does_not_come_after_a_later_one(etcd: EtcdServers) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(EtcdProxy(etcd.members[0].client_port))
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        far = stack.enter_context(EtcdClient(EtcdSettings.of([proxy.url])))
        own = OwnKeys(far)
        for number in range(2):
            own.put("/own/status", b"trains")
            proxy.keeps_back = lambda request: b"/v3/kv/txn" in request
            with pytest.raises(UnknownOutcomeError):
                own.put("/own/status", b"is stuck")
            proxy.keeps_back = lambda request: False
            own.put("/own/status", f"trains again {number}".encode())
            proxy.deliver()
            item = client.get("/own/status")
            assert item is not None
            assert item.value == f"trains again {number}".encode()


def test_own_key_replaces_another_and_is_rewritten_when_lost(etcd: EtcdServers) -> None:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as client:
        own = OwnKeys(client)
        client.put("/own/other", "of the life before")
        lease = client.grant_lease(60)
        own.put("/own/other", b"one", lease_id=lease.lease_id)
        client.revoke_lease(lease.lease_id)
        with pytest.raises(LeaseLostError):
            own.put("/own/other", b"two", lease_id=lease.lease_id)
        own.put("/own/other", b"three")
        item = client.get("/own/other")
        assert item is not None
        assert item.value == b"three"


def test_a_second_writer_is_reported(etcd: EtcdServers) -> None:
    """The second writer writes before each transaction of the first one, including the one that detects it."""
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(etcd.urls)) as other,
        EtcdClient(EtcdSettings.of([proxy.url])) as client,
    ):
        proxy.before = lambda request: b"/v3/kv/txn" in request and other.put("/own/third", "mine")
        with pytest.raises(CoordinationError, match="another client writes"):
            OwnKeys(client).put("/own/third", b"yours")


@pytest.mark.slow
def test_progress_notification_proves_no_majority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A member that lost contact with the others continues to send them: a watch that trusts them would never get
    events again."""
    often = ["--experimental-watch-progress-notify-interval", "100ms"]
    with (
        EtcdServers(tmp_path_factory.mktemp("minority"), num_members=3, arguments=often) as cluster,
        EtcdClient(EtcdSettings.of(cluster.members[0].url)) as client,
        Watch(client, KeyRange.key("a"), limits=WatchLimits(silence_s=0.5)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        for member in cluster.members[1:]:
            member.kill()

        wait_until(lambda: watch.problem != "", "the watch to ask for proof")


@pytest.mark.slow
def test_thread_does_not_wait_for_anothers_authentication(etcd: EtcdServers) -> None:
    with EtcdProxy(etcd.members[0].client_port) as proxy:
        proxy.conduct = Conduct.SWALLOW
        settings = EtcdSettings.of(proxy.url, credentials=Credentials("bob", "x"), attempt_s=60.0, call_s=60.0)
        with EtcdClient(settings) as client:
            patient = threading.Thread(target=_expect_failure, args=(client, 60.0, "this client is closed"))
            patient.start()
            wait_until(lambda: proxy.num_connections > 0, "the first to ask for a token")

            _expect_failure(client, 0.2, "no answer")

            assert patient.is_alive(), "the other one still waits"
            client.close()
            patient.join()


def _expect_failure(client: EtcdClient, deadline_s: float, reason: str) -> None:
    with pytest.raises(CoordinationError, match=reason):
        client.get("a", deadline_s=deadline_s)


def test_missed_short_deadline_interrupts_no_watch(etcd: EtcdServers, prefix: str) -> None:
    """A call with a short deadline that etcd missed proves nothing about the member."""
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix), limits=WatchLimits(silence_s=600.0, renew_s=600.0)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        client.put(prefix + "a", "")
        assert isinstance(watch.next(DEADLINE_S), Changes)
        before = proxy.num_connections
        proxy.conduct = Conduct.DRIP
        with pytest.raises(CoordinationError):
            client.get(prefix + "a", deadline_s=0.05)
        proxy.conduct = Conduct.PASS
        written = writer.put(prefix + "a", "")

        event = watch.next(DEADLINE_S)
        assert isinstance(event, Changes)
        assert event.revision == written
        assert not watch.problem
        assert proxy.num_connections == before, "the stream that was open before"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".example", "a..b"])
def test_host_that_cannot_be_resolved_is_a_coordination_error(host: str) -> None:
    with (
        EtcdClient(EtcdSettings.of(f"http://{host}:2379", call_s=0.2)) as client,
        pytest.raises(CoordinationError, match="no answer from etcd") as caught,
    ):
        client.get("a")
    assert host in str(caught.value)


@pytest.mark.slow
def test_proof_by_other_calls_keeps_no_dead_stream_alive(
    etcd: EtcdServers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls succeed, so the member is trusted; the stream delivers nothing and must be replaced once in `renew_s`."""
    clock, opened = SetClock(), list[bytes]()
    for module in ("gateway", "watch"):
        monkeypatch.setattr(f"megatrain_job.coordination.{module}.time", clock)

    def wait_for_streams(count: int) -> None:
        wait_until(lambda: len(opened) >= count, f"stream {count} to be opened")

    limits = WatchLimits(silence_s=0.05, renew_s=60.0)
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url, attempt_s=DEADLINE_S)) as client,
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
    ):
        proxy.before = lambda request: opened.append(request) if b"/v3/watch" in request else None
        with Watch(client, KeyRange.prefix(prefix), limits=limits) as watch:
            assert isinstance(watch.next(DEADLINE_S), Snapshot)
            for number in (1, 2, 3):
                written = writer.put(prefix + "a", "")
                event = watch.next(DEADLINE_S)
                assert isinstance(event, Changes)
                assert event.revision == written
                # The watch reads the clock at most five times each time it has waited for a message.
                clock.wait_for_reads(40)
                assert len(opened) == number, "no stream is replaced before its time"
                clock.now += limits.renew_s
                client.get(prefix + "a")
                wait_for_streams(number + 1)
            assert watch.next(0.0) is None
