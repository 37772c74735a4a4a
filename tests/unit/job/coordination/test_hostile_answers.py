"""Answers that etcd never gives: each is a CoordinationError, in bounded time and memory; the next valid one counts."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination import maintenance
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import Watch, WatchLimits
from megatrain_job.coordination.watch_event import Changes, Snapshot
from megatrain_job.coordination.wire import Compare, KeyRange, Put, Range
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import DEADLINE_S, wait_until

OK = b"HTTP/1.1 200 OK\r\n"
LONG = "9" * 5000
HEADER = {"cluster_id": "1", "member_id": "2", "revision": "7"}
A = {"key": "YQ==", "create_revision": "5", "mod_revision": "5", "version": "1"}
B = {"key": "Yg==", "create_revision": "5", "mod_revision": "5", "version": "1"}

Call = Callable[[EtcdClient], object]


def repeated(piece: bytes) -> Iterator[bytes]:
    return itertools.repeat(piece)


FRAMES: dict[str, tuple[bytes, bytes]] = {
    # the part that comes once, and the part that is repeated after it
    "a length of 5,000 digits": (OK + b"Content-Length: " + LONG.encode() + b"\r\n\r\n", b""),
    "a negative length": (OK + b"Content-Length: -1\r\n\r\n", b""),
    "two lengths": (OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b""),
    "a length that is not kept": (OK + b"Content-Length: 100\r\n\r\n{}", b""),
    "a line without end": (OK + b"A: ", b"b" * 1000),
    "a head without end": (OK, b"A: b\r\n" * 1000),
    "interim answers without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "a chunk size of 5,000 digits": (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n", b""),
    "a negative chunk size": (OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n", b""),
    "trailers without end": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n" * 1000),
    "a body without end": (OK + b"Content-Length: 99999999999999999\r\n\r\n{", b" " * 65536),
    "chunks without end": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b""),
    "another protocol": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b""),
    "an error without end": (b"HTTP/1.1 500 Oh\r\n\r\n", b"x" * 65536),
}


def pieces(first: bytes, again: bytes) -> Iterable[bytes]:
    return itertools.chain([first] if first else [], repeated(again)) if again else [first]


def http(body: bytes) -> list[bytes]:
    return [OK + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)]


def answer(**fields: Any) -> bytes:
    return json.dumps({"header": HEADER, **fields}).encode()


def read(client: EtcdClient) -> object:
    return client.read(Range(KeyRange.key("a")))


def read_all(client: EtcdClient) -> object:
    return client.read_all(KeyRange.prefix("a"))


def claim(client: EtcdClient) -> object:
    taken = client.txn([Compare.is_absent("a")], [Put("a", "")], [Range(KeyRange.key("a"))], is_repeatable=True)
    return taken if taken.succeeded else taken.range_response().first()


def renew(client: EtcdClient) -> object:
    return client.renew_lease(3)


def status(client: EtcdClient) -> object:
    return maintenance.status(client, client.settings.endpoints[0])


def header(**fields: Any) -> bytes:
    return json.dumps({"header": {**HEADER, **fields}}).encode()


ANSWERS: dict[str, tuple[Call, bytes]] = {
    "not UTF-8": (read, b'{"header": "\xff"}'),
    "lists in lists": (read, b"[" * 200_000),
    "objects in objects": (read, b'{"a":' * 200_000),
    "a number of 5,000 digits": (read, f'{{"header":{{"cluster_id":"1","revision":{LONG}}}}}'.encode()),
    "a text of 5,000 digits": (read, header(revision=LONG)),
    "a revision beyond 64 bits": (read, header(revision=str(2**63))),
    "a negative revision": (read, header(revision="-1")),
    "no revision": (read, header(revision="0")),
    "a revision with an underscore": (read, header(revision="1_0")),
    "a revision of other digits": (read, header(revision="\u0667")),
    "NaN": (read, b'{"header":{"cluster_id":"1","revision":NaN}}'),
    "infinity": (read, b'{"header":{"cluster_id":"1","revision":1e999}}'),
    "a revision that is true": (read, header(revision=True)),
    "a cluster that is no number": (read, header(cluster_id="x")),
    "a header that is a list": (read, b'{"header":[1]}'),
    "keys that are numbers": (read, answer(kvs=[1])),
    "a key that is no base64": (read, answer(kvs=[{**A, "key": "%%"}])),
    "a value that is a list": (read, answer(kvs=[{**A, "value": []}])),
    "a key without a name": (read, answer(kvs=[{"mod_revision": "5"}])),
    "a key without a revision": (read, answer(kvs=[{"key": "YQ=="}])),
    "another key": (read, answer(kvs=[B])),
    "the same key twice": (read_all, answer(kvs=[A, A])),
    "keys against their order": (read_all, answer(kvs=[{**A, "key": "YWI="}, A])),
    "more, and nothing": (read_all, answer(more=True)),
    "more that is no truth value": (read_all, answer(kvs=[A], more="yes")),
    "a transaction without answers": (claim, answer(succeeded=True)),
    "a transaction of another kind": (claim, answer(succeeded=False, responses=[{"response_put": {"header": HEADER}}])),
    "a transaction of nothing": (claim, answer(succeeded=False, responses=[{}])),
    "another lease": (renew, b'{"result":{"header":{"cluster_id":"1"},"ID":"4","TTL":"9"}}'),
    "a lease without an end": (
        renew, b'{"result":{"header":{"cluster_id":"1"},"ID":"3","TTL":"%s"}}' % LONG.encode(),
    ),
    "a result beside an error": (renew, b'{"result":7,"error":[]}'),
    "a status without a header": (status, b'{"version":"3"}'),
    "alarms that are texts": (maintenance.alarms, answer(alarms=["x"])),
}  # fmt: skip


def event(kv: object, *, revision: str = "7", **fields: Any) -> dict[str, Any]:
    return {"header": {**HEADER, "revision": revision}, "events": [{"kv": kv, **fields}]}


RESULTS: dict[str, Any] = {
    "a revision of 5,000 digits": {"header": {"revision": LONG}},
    "a negative revision": {"header": {"revision": "-5"}},
    "a sign of progress far ahead": {"header": {"revision": str(2**62)}},
    "a sign of progress behind": {"header": {"revision": "1"}},
    "an event of the future": event({**A, "mod_revision": str(2**62)}),
    "an event without a key": event(None),
    "an event of another kind": event(A, type=5),
    "an event of another key": event(B, revision=str(2**62)),
    "a key that is no base64": event({**A, "key": "%"}),
    "events that are an object": {"header": HEADER, "events": {}},
    "events that are numbers": {"header": HEADER, "events": [1]},
    "an end without a reason": {"canceled": True, "cancel_reason": [1]},
    "history that is gone, by 5,000 digits": {"canceled": True, "compact_revision": LONG},
}
MESSAGES = {
    "no result": b"{}",
    "a number": b"7",
    "lists in lists": b"[" * 200_000,
    "a number of 5,000 digits": b'{"result":{"created":true,"x":%s}}' % LONG.encode(),
    "an error of another shape": b'{"error":{"code":"x"}}',
    "an error": b'{"error":{"code":14,"message":"bye"}}',
} | {name: json.dumps({"result": result}).encode() for name, result in RESULTS.items()}


CREATED = b"HTTP/1.0 200 OK\r\n\r\n" + b'{"result":{"created":true}}\n'


def all_at_once(check: Callable[[str], None], names: Iterable[str]) -> dict[str, BaseException]:
    """Return the errors, by name: sequentially, this would take a minute."""
    with ThreadPoolExecutor(32) as pool:
        asked = {name: pool.submit(check, name) for name in names}
    return {name: error for name, one in asked.items() if (error := one.exception()) is not None}


UNARY = {name: (read, pieces(*frame)) for name, frame in FRAMES.items()} | {
    name: (call, http(body)) for name, (call, body) in ANSWERS.items()
}


@pytest.mark.slow
def test_hostile_answer_to_a_call_is_an_error_of_coordination(etcd: EtcdServers) -> None:
    def check(name: str) -> None:
        call, garbage = UNARY[name]
        with EtcdProxy(etcd.members[0].client_port) as proxy:
            proxy.garbage, proxy.conduct = garbage, Conduct.GARBAGE
            with EtcdClient(EtcdSettings.of(proxy.url, call_s=1.0)) as client:
                # Sequential answers would be equivalent: the call has time for few of them.
                with pytest.raises(CoordinationError) as caught:
                    call(client)
                assert len(str(caught.value)) < 600, "an error of a readable length"
                wait_until(lambda: proxy.num_corrupted > 0, "the call to be answered")
                proxy.conduct = Conduct.PASS

                assert client.get("hostile/none", deadline_s=DEADLINE_S) is None, "the next good answer is understood"

    assert all_at_once(check, UNARY) == {}


@pytest.mark.slow
def test_hostile_answer_to_a_watch_is_survived(etcd: EtcdServers) -> None:
    """Only the watch gets it, and once: it continues, and receives later events."""

    def check(name: str) -> None:
        prefix = f"a{name}/"
        with (
            EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
            EtcdProxy(etcd.members[0].client_port) as proxy,
            EtcdClient(EtcdSettings.of(proxy.url)) as client,
        ):
            proxy.corrupts = lambda request: b"/v3/watch" in request and not proxy.num_corrupted
            if name in FRAMES:
                proxy.garbage = pieces(*FRAMES[name])
            else:  # Events of key "a" become events of the key that is written here.
                message = MESSAGES[name].replace(b"YQ==", base64.b64encode(f"{prefix}a".encode()))
                proxy.garbage = [CREATED + message + b"\n"]
            proxy.conduct = Conduct.GARBAGE
            with Watch(client, KeyRange.prefix(prefix)) as watch:
                wait_until(lambda: proxy.num_corrupted == 1, "the watch to be answered")
                writer.put(prefix + "a", "reported")
                received: set[tuple[bytes, bytes]] = set()

                def is_received() -> bool:
                    event = watch.next(0.05)
                    if event is not None:
                        items = (
                            event.items if isinstance(event, Snapshot) else [change.item for change in event.changes]
                        )
                        received.update((item.key, item.value) for item in items)
                    return bool(received)

                wait_until(is_received, "the written change to arrive")
                assert received == {(prefix.encode() + b"a", b"reported")}, "only what is in etcd"

    assert all_at_once(check, [*FRAMES, *MESSAGES]) == {}


def test_event_of_a_future_revision_gives_a_snapshot(etcd: EtcdServers, prefix: str, proxy: EtcdProxy) -> None:
    """An event with only a wrong revision is received; what is written after it must be received too."""
    key = prefix + "a"
    kv = {**A, "key": base64.b64encode(key.encode()).decode(), "mod_revision": str(2**62)}
    proxy.corrupts = lambda request: b"/v3/watch" in request and not proxy.num_corrupted
    proxy.garbage = [CREATED + json.dumps({"result": event(kv, revision=str(2**62))}).encode() + b"\n"]
    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        reported = watch.next(DEADLINE_S)
        assert isinstance(reported, Changes)
        assert reported.revision == 2**62
        restarted = watch.next(DEADLINE_S)
        assert isinstance(restarted, Snapshot)
        assert "went back" in restarted.reason
        written = writer.put(key, "")

        received = watch.next(DEADLINE_S)
        assert isinstance(received, Changes)
        assert received.revision == written


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=400),
        st.binary(max_size=200).map(lambda body: b"".join(http(body))),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(LONG[:4400]),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
                st.sampled_from(["header", "revision", "cluster_id", "kvs", "key", "value", "more", "count", "result",
                                 "error", "code", "message", "events", "kv", "type", "created", "canceled"]),
                inner, max_size=6,
            ),
            max_leaves=30,
        ).map(lambda value: b"".join(http(json.dumps(value).encode()))),
    )
)  # fmt: skip
def test_any_answer_is_understood_or_an_error_of_coordination(proxy: EtcdProxy, data: bytes) -> None:
    proxy.garbage = [data]
    for call in (read, claim, renew, read_all):
        with EtcdClient(EtcdSettings.of(proxy.url, attempt_s=0.5, call_s=0.01)) as client:
            assert len(error_of(call, client)) < 600


def error_of(call: Call, client: EtcdClient) -> str:
    try:
        call(client)
    except CoordinationError as error:
        return str(error)
    return ""


def test_watch_that_drips_is_replaced(etcd: EtcdServers, prefix: str, proxy: EtcdProxy) -> None:
    """Data arrive all the time and no message is ever complete: that counts as silence, and no stream may be silent
    long."""

    def drip() -> Iterator[bytes]:
        yield CREATED
        while not is_over.wait(0.02):
            yield b" "

    is_over = threading.Event()
    proxy.corrupts = lambda request: b"/v3/watch" in request and not proxy.num_corrupted
    proxy.garbage = drip()
    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix), limits=WatchLimits(silence_s=0.2, renew_s=0.5)) as watch,
    ):
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        wait_until(lambda: proxy.num_corrupted == 1, "the watch to be answered")
        writer.put(prefix + "a", "")

        assert isinstance(watch.next(DEADLINE_S), Changes)
        is_over.set()


def test_contradictory_transaction_answer_is_an_error(proxy: EtcdProxy) -> None:
    """The key is neither absent nor present: the answer is well-formed."""
    proxy.garbage = http(answer(responses=[{"response_range": {"header": HEADER}}]))
    with EtcdClient(EtcdSettings.of(proxy.url)) as client, pytest.raises(CoordinationError, match="contradicts itself"):
        claim(client)


@pytest.fixture
def proxy(etcd: EtcdServers) -> Iterator[EtcdProxy]:
    with EtcdProxy(etcd.members[0].client_port) as one:
        one.conduct = Conduct.GARBAGE
        yield one


@pytest.mark.slow(kept=["lists"])
@pytest.mark.parametrize(
    ("piece", "end"),
    [(b"[],", b"[]"), (b"{},", b"{}"), (b'"\\u1234",', b'""'), (b"7,", b"7"), (b'{"a":{"b":[', b"7")],
    ids=["lists", "objects", "texts", "numbers", "depth"],
)
def test_memory_is_bounded(proxy: EtcdProxy, piece: bytes, end: bytes) -> None:
    """48 MB that would become gigabytes of Python's objects."""
    body = b'{"kvs":[' + piece * (48_000_000 // len(piece)) + end + b"]}"
    proxy.garbage = http(body)
    with EtcdClient(EtcdSettings.of(proxy.url, attempt_s=20.0, call_s=20.0)) as client:
        endpoint = client.settings.endpoints[0]
        tracemalloc.start()
        with pytest.raises(CoordinationError):
            client.gateway.call_at(endpoint, "/v3/kv/range", {}, bool, what="a test")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * len(body)
