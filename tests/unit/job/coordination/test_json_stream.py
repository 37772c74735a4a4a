"""A streamed response of etcd: the same messages for any division into packets."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatrain_job.coordination.errors import InvalidResponseError
from megatrain_job.coordination.http_exchange import HttpExchange
from megatrain_job.coordination.json_stream import JsonStream
from megatrain_job.coordination.transport import Deadline
from tests.helpers.waiting import DEADLINE_S

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
MESSAGES = [{"created": True}, {"events": [{"kv": {"key": "YQ=="}}]}, {"canceled": True}]
LINES = [json.dumps({"result": message}).encode() + b"\n" for message in MESSAGES]
RESPONSE = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in LINES) + b"0\r\n\r\n"


class _Packets:
    """A connection that receives these packets."""

    def __init__(self, packets: list[bytes]) -> None:
        self._packets = iter(packets)

    def send(self, request: bytes, deadline: Deadline) -> None:
        assert request.startswith(b"POST /v3/watch ")

    def receive(self, remaining_s: float) -> bytes:
        return next(self._packets, b"")


def stream_of(packets: list[bytes]) -> JsonStream:
    connection: Any = _Packets(packets)
    exchange = HttpExchange("a:1", "/v3/watch", b"{}", None, is_last=False)
    return JsonStream(connection, exchange, lambda stream: None)


@given(st.lists(st.integers(1, len(RESPONSE) - 1), max_size=6))
@example([len(HEAD)])
def test_messages_do_not_depend_on_the_packets(places: list[int]) -> None:
    edges = [0, *sorted(set(places)), len(RESPONSE)]
    stream = stream_of([RESPONSE[start:stop] for start, stop in itertools.pairwise(edges)])
    stream.start(Deadline(DEADLINE_S))
    assert [stream.next(DEADLINE_S) for _ in MESSAGES] == MESSAGES


def test_stream_without_a_whole_message_is_an_error() -> None:
    for packets, problem in (
        ([HEAD, b"0\r\n\r\n"], "the stream ended before its first message"),
        ([RESPONSE[: len(HEAD) + 10]], "the connection was closed in the middle of an answer"),
    ):
        with pytest.raises(InvalidResponseError, match=problem):
            stream_of(packets).start(Deadline(DEADLINE_S))
