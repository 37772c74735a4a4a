"""Endpoints, key ranges, conditions, the forms of errors in three versions of etcd, and the queue of a watch."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.contracts.errors import ConfigError, CoordinationError, CoordinationRefusedError
from megatrain.contracts.exit_codes import ExitCode
from megatrain_job.coordination.errors import (
    CompactedError,
    FutureRevisionError,
    InvalidResponseError,
    LeaseExistsError,
    LeaseLostError,
    NoSpaceError,
)
from megatrain_job.coordination.event_queue import EventQueue
from megatrain_job.coordination.gateway_response import GatewayError, MalformedError, read_response, unwrap
from megatrain_job.coordination.json_fields import bytes_field, int_field
from megatrain_job.coordination.operation_responses import TxnResponse
from megatrain_job.coordination.settings import Credentials, Endpoint, EtcdSettings, TlsFiles
from megatrain_job.coordination.transport import EndpointRing
from megatrain_job.coordination.wire import KeyRange, KeyValue, Range
from tests.helpers.refusals import refusal
from tests.helpers.waiting import wait_until


def test_endpoint_is_read() -> None:
    shown = {
        "etcd-1": "http://etcd-1:2379",
        "10.0.0.1:4001": "http://10.0.0.1:4001",
        "https://a.b.c": "https://a.b.c:2379",
        " http://a:1/ ": "http://a:1",
        "[::1]:2379": "http://[::1]:2379",
        "unix:/run/etcd/client:0": "unix:/run/etcd/client:0",
        "unix:///run/etcd": "unix:/run/etcd",
    }
    assert {text: str(Endpoint.parse(text)) for text in shown} == shown


def test_malformed_endpoint_is_named() -> None:
    for text in (
        "", "ftp://a", "http://", "a:b", "a:99999", "a:0", "http://a/path", "a b", "a\r\nX: y",
        "unix:relative", "unix:/with space", f"unix:/{'x' * 107}",
    ):  # fmt: skip
        assert "etcd endpoint" in refusal(ConfigError, Endpoint.parse, text), text


def test_endpoints_come_from_one_text_and_once_each() -> None:
    settings = EtcdSettings.of("a:1, b:2,a:1,", tls=TlsFiles())

    assert [str(endpoint) for endpoint in settings.endpoints] == ["https://a:1", "https://b:2"]
    with pytest.raises(ConfigError, match="no endpoint"):
        EtcdSettings.of("")


def test_password_is_in_no_text() -> None:
    settings = EtcdSettings.of("https://a:1", credentials=Credentials("bob", "hunter2"))

    assert "hunter2" not in f"{settings} {settings!r} {settings.credentials}"
    with pytest.raises(ConfigError) as caught:
        EtcdSettings.of("http://bob:hunter2@a:1")
    assert "hunter2" not in str(caught.value)


def test_password_over_plain_http_is_refused_with_a_hint() -> None:
    bob = Credentials("bob", "hunter2")
    for where in ("http://10.0.0.1:1", "etcd-1", "https://a:1,http://b:1", "http://127.0.0.1.nip.io"):
        reason = refusal(ConfigError, EtcdSettings.of, where, credentials=bob)
        assert re.search(r"over plain http .*; let etcd serve TLS and write https://", reason), where
        assert "hunter2" not in reason
    for where in ("https://10.0.0.1:1", "127.0.0.1:1,[::1]:1,localhost", "unix:/run/etcd/client:0"):
        assert EtcdSettings.of(where, credentials=bob).credentials is not None


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    for files, name in [
        (TlsFiles(ca=tmp_path / "absent.pem"), "absent.pem"),
        (TlsFiles(ca=broken), "broken.pem"),
        (TlsFiles(certificate=broken, key=broken), "broken.pem"),
        (TlsFiles(key=broken), "go together"),
    ]:
        with pytest.raises(ConfigError, match=name):
            files.context()


@given(st.binary(max_size=4), st.binary(max_size=6))
def test_prefix_range_holds_exactly_the_keys_that_begin_so(prefix: bytes, key: bytes) -> None:
    keys = KeyRange.prefix(prefix)

    for candidate in (key, prefix + key):
        # etcd has no empty key
        if candidate:
            is_in = candidate >= keys.start and (keys.end == b"\0" or candidate < keys.end)
            assert is_in == candidate.startswith(prefix)


def test_reads_are_linearizable() -> None:
    """A serializable read may be served by a member without a quorum, so it may be stale."""
    assert "serializable" not in Range(KeyRange.key("a")).to_json()


def test_field_of_another_kind_is_malformed() -> None:
    for raw in ({"key": 1}, {"key": "%%"}, {"key": "YQ==", "mod_revision": "x"}, {"key": "YQ==", "lease": True}):
        assert refusal(MalformedError, KeyValue.from_json, raw), raw
    # base64 with another alphabet
    assert "is not base64" in refusal(MalformedError, bytes_field, {"key": "\u00e4"}, "key")


def test_absent_fields_are_zero_and_integers_may_be_text() -> None:
    assert KeyValue.from_json({"key": "YQ==", "mod_revision": "1"}) == KeyValue(b"a", b"", 0, 1, 0)
    assert int_field({"a": str(2**63 - 1)}, "a") == 2**63 - 1
    assert TxnResponse.from_json({"header": {"revision": "3"}}, (), ()) == TxnResponse(3, False, ())


@pytest.mark.parametrize(
    "content",
    [
        # etcd 3.4 and 3.5, then 3.6
        b'{"error":"etcdserver: requested lease not found","message":"etcdserver: requested lease not found","code":5}',
        b'{"code":5,"message":"etcdserver: requested lease not found","details":[]}',
    ],
)
def test_error_of_a_call_is_read_in_each_version(content: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        read_response(404, content)

    error = caught.value.typed("etcd put of 'a'", "http://e:1", "'a'")
    assert type(error) is LeaseLostError
    assert (error.endpoints, error.key) == (("http://e:1",), "'a'")
    assert str(error) == "etcd put of 'a': etcdserver: requested lease not found (http://e:1)"


@pytest.mark.parametrize(
    "message",
    [
        {"error": {"grpc_code": 14, "http_code": 503, "message": "no leader", "http_status": "Service Unavailable"}},
        {"error": {"code": 14, "message": "no leader", "details": []}},
    ],
)
def test_error_of_a_stream_is_read_in_each_version(message: dict[str, object]) -> None:
    with pytest.raises(GatewayError, match="no leader") as caught:
        unwrap(message)

    assert caught.value.is_passing
    assert not caught.value.may_have_applied


ERRORS: list[tuple[int, str, type[CoordinationError]]] = [
    (3, "etcdserver: authentication failed, invalid user ID or password", CoordinationRefusedError),
    (3, "etcdserver: user name is empty", CoordinationRefusedError),
    (7, "etcdserver: permission denied", CoordinationRefusedError),
    (16, "etcdserver: invalid auth token", CoordinationRefusedError),
    (9, "etcdserver: authentication is not enabled", CoordinationRefusedError),
    (8, "etcdserver: mvcc: database space exceeded", NoSpaceError),
    (11, "etcdserver: mvcc: required revision has been compacted", CompactedError),
    (11, "etcdserver: mvcc: required revision is a future revision", FutureRevisionError),
    (9, "etcdserver: lease already exists", LeaseExistsError),
    (3, "etcdserver: key is not provided", CoordinationError),
]


def test_permanent_errors_are_typed() -> None:
    for code, message, kind in ERRORS:
        error = GatewayError(code, message)
        assert type(error.typed("x", "e", None)) is kind, message
        assert not error.is_passing, message
        assert kind.exit_code in (ExitCode.COORDINATION, ExitCode.NO_PERMISSION)


def test_answer_that_is_not_etcds_is_garbage() -> None:
    for content in (b"", b"<html>", b"[]", b'{"code":"5"}', b"[" * 100_000):
        assert refusal(InvalidResponseError, read_response, 502, content), content[:20]


def test_ring_asks_first_what_failed_longest_ago() -> None:
    a, b, c = endpoints = [Endpoint("http", name, 1) for name in "abc"]
    ring = EndpointRing(endpoints)

    assert ring.best() == a
    assert ring.failed(a)
    assert not ring.failed(a)
    assert ring.best() == b
    ring.failed(b)
    ring.failed(c)
    assert ring.best() == a
    assert ring.succeeded(a)
    ring.failed(a)
    assert ring.best() == b


def test_queue_makes_its_writer_wait_and_drops_nothing() -> None:
    queue: EventQueue[int] = EventQueue(2)
    accepted: list[int] = []

    def write() -> None:
        for number in range(5):
            if queue.put(number):
                accepted.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: accepted == [0, 1], "the queue to fill")
    assert [queue.take(5.0) for _ in range(4)] == [0, 1, 2, 3]
    writer.join()
    assert queue.take(5.0) == 4
    assert queue.take(0.0) is None


def test_closed_queue_frees_its_writer_and_keeps_what_is_in_it() -> None:
    queue: EventQueue[int] = EventQueue(1)
    queue.put(1)
    answers: list[bool] = []
    writer = threading.Thread(target=lambda: answers.append(queue.put(2)))
    writer.start()

    queue.close(CoordinationError("over"))
    writer.join()

    assert answers == [False]
    assert queue.take(5.0) == 1
    with pytest.raises(CoordinationError, match="over"):
        queue.take(5.0)
