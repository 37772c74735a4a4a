"""Parsing HTTP from bytes: for any division into packets, the same as the standard library's reader, or a clear
error."""

from __future__ import annotations

import http.client
import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatrain_job.coordination.errors import InvalidResponseError
from megatrain_job.coordination.http_exchange import HttpExchange
from tests.helpers.refusals import refusal


class _SocketBytes:
    """A socket for the standard library's reader."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def read(pieces: list[bytes]) -> tuple[HttpExchange, bytes]:
    response = HttpExchange("a:1", "/v3/kv/range", b"{}", None, is_last=False)
    body = b"".join(response.feed(piece) for piece in pieces if piece)
    response.end()
    return response, body


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


def chunked(pieces: list[bytes], extension: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces if piece)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.integers(0, 500), max_size=8), st.booleans())
def test_chunks_are_read_however_they_are_cut(pieces: list[bytes], places: list[int], has_extension: bool) -> None:
    data = chunked(pieces, b";name=value" if has_extension else b"")
    oracle = http.client.HTTPResponse(_SocketBytes(data))  # type: ignore[arg-type]
    oracle.begin()

    response, body = read(cut(data, places))

    assert response.is_complete
    assert (response.status, body) == (oracle.status, oracle.read()) == (200, b"".join(pieces))


@given(st.binary(max_size=200), st.lists(st.integers(0, 500), max_size=8))
def test_counted_body_is_read_however_it_is_cut(body: bytes, places: list[int]) -> None:
    data = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)

    response, found = read(cut(data, places))

    assert (response.status, found, response.is_complete, response.is_last) == (404, body, True, True)


def test_body_without_length_ends_with_the_connection() -> None:
    response, body = read([b"HTTP/1.0 200 OK\r\n\r\nab", b"c"])

    assert (body, response.is_complete, response.is_last) == (b"abc", True, True)


def test_interim_answers_are_passed_over() -> None:
    response, body = read([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"])

    assert (response.status, body, response.is_last) == (200, b"x", False)


COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


GARBAGE = [
    (b"", "without an answer"),
    (b"SSH-2.0-OpenSSH\r\n", "in the middle"),
    (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
    (b"\x15\x03\x01\x00\x02\x02", "not HTTP"),
    (b"HTTP/1.1 abc\r\n\r\n", "status line"),
    (b"HTTP/1.1\r\n\r\n", "status line"),
    (b"HTTP/1.1 099 OK\r\n\r\n", "not HTTP"),
    (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "not HTTP"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 17, "more than 16 interim answers"),
    (b"HTTP/1.1 200 OK\r\nA" + b"b" * 70_000, "too long"),
    (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000, "too long"),
    (COUNTED % b"-1", "bad Content-Length"),
    (COUNTED % b"1_0", "bad Content-Length"),
    (COUNTED % b"", "bad Content-Length"),
    (COUNTED % (b"9" * 5000), "bad Content-Length"),
    (COUNTED % b"9\r\nContent-Length: 8", "conflicting Content-Length"),
    (COUNTED % b"9, 8", "conflicting Content-Length"),
    (COUNTED % b"9" + b"abc", "in the middle"),
    (COUNTED % b"1" + b"abc", "after the end"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "not HTTP"),
    (CHUNKED + b"0x3\r\nabc\r\n", "chunk header"),
    (CHUNKED + b"-3\r\nabc\r\n", "chunk header"),
    (CHUNKED + b"f" * 5000 + b"\r\nabc\r\n", "chunk header"),
    (CHUNKED + b"0" * 70_000, "too long"),
    (CHUNKED + b"2\r\nabc\r\n", "chunk footer"),
    (CHUNKED + b"3\r\nabc\r\n", "in the middle"),
    (CHUNKED + b"0\r\n" + b"A: b\r\n" * 20_000, "too long"),
]


def test_malformed_answer_is_an_error_with_the_reason() -> None:
    for data, message in GARBAGE:
        reason = refusal(InvalidResponseError, read, [data])
        assert message in reason, data[:80]
        assert len(reason) < 200


@given(st.binary(max_size=300), st.lists(st.integers(0, 500), max_size=4))
def test_any_bytes_are_an_answer_or_garbage(data: bytes, places: list[int]) -> None:
    for start in (b"", CHUNKED, COUNTED % b"1", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 ", b"HTTP/1.1 100 Continue\r\n"):
        try:
            response, _ = read(cut(start + data, places))
        except InvalidResponseError:
            continue
        assert response.is_complete
