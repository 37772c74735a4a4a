"""Connections between ranks: unauthenticated peers and forged messages are refused, and every wait ends."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from megatrain.contracts.errors import CommunicationError
from megatrain.peers.link import MAX_MESSAGE_BYTES, PeerAddress, PeerConnection, PeerLimits, connect_peer
from megatrain.peers.server import PeerServer, listen
from tests.helpers.thread_starts import no_thread_starts
from tests.helpers.waiting import DEADLINE_S, wait_until

SECRET, OTHER_SECRET = bytes(32), bytes(31) + b"\1"
LIMITS = PeerLimits(authentication_s=DEADLINE_S, call_s=DEADLINE_S, total_s=2 * DEADLINE_S)
SHORT_LIMITS = PeerLimits(authentication_s=0.2, call_s=0.2, total_s=0.5)
HELLO_BYTES = 8 + 32


@contextmanager
def serving(
    serve: Callable[[PeerConnection], None], limits: PeerLimits = LIMITS
) -> Iterator[tuple[PeerServer, PeerAddress]]:
    listener = listen("127.0.0.1")
    address = PeerAddress(*listener.getsockname())
    with PeerServer(listener, SECRET, serve, limits) as server:
        yield server, address


def outcome_of(serve: Callable[[PeerConnection], Any]) -> tuple[Callable[[PeerConnection], None], queue.Queue[Any]]:
    """Return a service whose result or error can be waited for."""
    outcomes: queue.Queue[Any] = queue.Queue()

    def run(connection: PeerConnection) -> None:
        try:
            outcomes.put(serve(connection))
        except CommunicationError as error:
            outcomes.put(error)

    return run, outcomes


def raw_connection(address: PeerAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), 10.0)


def is_dropped(stranger: socket.socket) -> bool:
    """Return whether the server closes this connection; it may have sent its hello."""
    received = b""
    with suppress(ConnectionResetError):
        while chunk := stranger.recv(4096):
            received += chunk
    return len(received) <= HELLO_BYTES


def test_messages_and_bytes_go_both_ways() -> None:
    def serve(connection: PeerConnection) -> None:
        request = connection.receive_message()
        block = bytearray(100_000)
        connection.receive_into(memoryview(block))
        connection.check_tag()
        connection.send_message(request + b" answered")
        connection.send(bytes(reversed(block)))
        connection.send_tag()

    content = os.urandom(100_000)
    with serving(serve) as (_, address), connect_peer(address, SECRET, LIMITS) as connection:
        connection.send_message(b"question")
        connection.send(memoryview(content)[:60_000])
        connection.send(memoryview(content)[60_000:])
        connection.send_tag()
        assert connection.receive_message() == b"question answered"
        back = bytearray(100_000)
        connection.receive_into(memoryview(back))
        connection.check_tag()
        assert back[::-1] == content


def test_empty_and_longest_messages_are_received() -> None:
    serve, outcomes = outcome_of(lambda connection: [connection.receive_message(), connection.receive_message()])
    with serving(serve) as (_, address), connect_peer(address, SECRET, LIMITS) as connection:
        connection.send_message(b"")
        connection.send_message(b"x" * MAX_MESSAGE_BYTES)
        assert outcomes.get(timeout=DEADLINE_S) == [b"", b"x" * MAX_MESSAGE_BYTES]


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64), b"x" * 100_000])
def test_an_unauthenticated_peer_is_dropped_others_are_served(data: bytes) -> None:
    serve, outcomes = outcome_of(lambda connection: connection.receive_message())
    with serving(serve) as (_, address), raw_connection(address) as stranger:
        with suppress(OSError):  # It may be dropped before it has finished.
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        assert is_dropped(stranger)
        with connect_peer(address, SECRET, LIMITS) as connection:
            connection.send_message(b"from a rank")
            assert outcomes.get(timeout=DEADLINE_S) == b"from a rank"


def test_another_rounds_secret_is_refused_on_both_sides() -> None:
    serve, outcomes = outcome_of(lambda connection: connection.receive_message())
    with serving(serve) as (_, address):
        with pytest.raises(CommunicationError, match=r"127\.0\.0\.1:\d+: the peer closed the connection"):
            connect_peer(address, OTHER_SECRET, LIMITS)
        assert outcomes.empty()


def test_server_without_the_secret_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        # it sends a hello, ignores the client's authentication, and answers with an invented one
        theirs.sendall(b"MTPEER1\n" + bytes(32) + bytes(32))
        connection = PeerConnection(ours, "a liar", LIMITS)
        with connection, pytest.raises(CommunicationError, match="a liar: the peer does not have the same secret"):
            connection.authenticate(SECRET, is_server=False)
        assert len(theirs.recv(4096)) == 64


def test_other_program_on_the_port_is_recognized() -> None:
    ours, theirs = socket.socketpair()
    with theirs, PeerConnection(ours, "a web server", LIMITS) as connection:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(CommunicationError, match="the program that listens there is not a megatrain program"):
            connection.authenticate(SECRET, is_server=False)


def authenticated_pair(limits: PeerLimits = LIMITS) -> tuple[PeerConnection, PeerConnection, socket.socket]:
    """Return both ends of a connection, and the client's socket."""
    ours, theirs = socket.socketpair()
    client, server = PeerConnection(ours, "server", limits), PeerConnection(theirs, "client", limits)
    thread = threading.Thread(target=lambda: server.authenticate(SECRET, is_server=True))
    thread.start()
    client.authenticate(SECRET, is_server=False)
    thread.join(DEADLINE_S)
    return client, server, ours


def test_changed_bytes_are_noticed() -> None:
    client, server, wire = authenticated_pair()
    with client, server:
        client.send(b"0123")
        wire.sendall(b"!")  # not from the rank: it never computed the client's HMAC
        client.send(b"567")
        client.send_tag()
        server.receive_into(memoryview(bytearray(8)))
        with pytest.raises(CommunicationError, match="its bytes were changed"):
            server.check_tag()


def test_reflected_handshake_is_refused() -> None:
    client, server, wire = authenticated_pair()
    with client, server:
        server.send(b"seal")
        server.send_tag()
        echoed = wire.recv(4 + 32, socket.MSG_WAITALL)
        wire.sendall(echoed)
        server.receive_into(memoryview(bytearray(4)))
        with pytest.raises(CommunicationError, match="its bytes were changed"):
            server.check_tag()


def test_oversized_message_is_refused_before_it_is_read() -> None:
    client, server, _ = authenticated_pair()
    with client, server:
        client.send(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        with pytest.raises(CommunicationError, match="the peer announces a message of 4097 bytes; the limit is 4096"):
            server.receive_message()


def test_closed_connection_is_reported() -> None:
    client, server, _ = authenticated_pair()
    with server:
        client.send(b"half")
        client.close()
        with pytest.raises(CommunicationError, match="client: the peer closed the connection"):
            server.receive_into(memoryview(bytearray(8)))


def test_silent_peer_is_awaited_within_the_call_limit() -> None:
    client, server, _ = authenticated_pair(PeerLimits(authentication_s=DEADLINE_S, call_s=0.05, total_s=600.0))
    with client, server, pytest.raises(CommunicationError, match="client: timed out"):
        server.receive_into(memoryview(bytearray(1)))


def test_peer_that_never_reads_is_given_up() -> None:
    client, server, _ = authenticated_pair(PeerLimits(authentication_s=DEADLINE_S, call_s=0.05, total_s=600.0))
    with client, server, pytest.raises(CommunicationError, match="server: timed out"):
        client.send(bytes(64 << 20))


def test_send_after_the_deadline_fails() -> None:
    client, server, _ = authenticated_pair(PeerLimits(authentication_s=DEADLINE_S, call_s=600.0, total_s=0.05))
    with client, server:
        with pytest.raises(CommunicationError, match=r"client: (too slow|timed out)"):
            server.receive_into(memoryview(bytearray(1)))
        with pytest.raises(CommunicationError, match="client: too slow"):
            server.send(b".")


def test_a_dripping_peer_is_given_up_at_the_deadline() -> None:
    client, server, _ = authenticated_pair(PeerLimits(authentication_s=600.0, call_s=600.0, total_s=0.3))
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.01):
            try:
                client.send(b".")
            except CommunicationError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with client, server:
        with pytest.raises(CommunicationError, match=r"client: (too slow|timed out)"):
            server.receive_into(memoryview(bytearray(1_000_000)))
        is_over.set()
        thread.join(DEADLINE_S)


def test_silent_peers_are_dropped_in_time_and_bounded_in_number() -> None:
    serve, outcomes = outcome_of(lambda connection: connection.receive_message())
    with serving(serve, SHORT_LIMITS) as (_, address):
        strangers = [raw_connection(address) for _ in range(12)]
        try:
            assert all(is_dropped(stranger) for stranger in strangers)
        finally:
            for stranger in strangers:
                stranger.close()

        def is_served() -> bool:
            # A busy machine may be too slow for such limits.
            with suppress(CommunicationError), connect_peer(address, SECRET, LIMITS) as connection:
                connection.send_message(b"still here")
                return bool(outcomes.get(timeout=DEADLINE_S) == b"still here")
            return False

        wait_until(is_served, "an answer to a rank")


def test_server_without_threads_drops_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    serve, outcomes = outcome_of(lambda connection: connection.receive_message())
    with serving(serve) as (_, address):
        with no_thread_starts():
            # more than may be unauthenticated at a time
            for _ in range(10):
                with raw_connection(address) as refused:
                    assert refused.recv(1) == b""
        with connect_peer(address, SECRET, LIMITS) as connection:
            connection.send_message(b"from a rank")
            assert outcomes.get(timeout=DEADLINE_S) == b"from a rank"
    (message,) = caplog.messages
    assert "no thread could be started for it: can't start new thread" in message


def test_closing_a_server_ends_what_it_serves() -> None:
    is_served = threading.Event()

    def wait_for_more(connection: PeerConnection) -> bytes:
        is_served.set()
        return connection.receive_message()

    serve, outcomes = outcome_of(wait_for_more)
    with serving(serve) as (server, address):
        connection = connect_peer(address, SECRET, LIMITS)
        assert is_served.wait(DEADLINE_S)
        server.close()
        assert isinstance(outcomes.get(timeout=DEADLINE_S), CommunicationError)
        with connection, pytest.raises(CommunicationError):
            connection.receive_message()
        with pytest.raises(CommunicationError, match=f"{address}: cannot be reached: Connection refused"):
            connect_peer(address, SECRET, LIMITS)


def test_a_cut_wakes_the_thread_that_waits() -> None:
    client, server, _ = authenticated_pair()
    outcomes: queue.Queue[str] = queue.Queue()

    def wait() -> None:
        try:
            server.receive_into(memoryview(bytearray(1)))
        except CommunicationError as error:
            outcomes.put(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    with client, server:
        server.cut()
        assert "closed the connection" in outcomes.get(timeout=DEADLINE_S)
        thread.join(DEADLINE_S)


def test_listening_at_a_foreign_address_is_refused() -> None:
    with pytest.raises(CommunicationError, match=r"192\.0\.2\.1: cannot listen on this address"):
        listen("192.0.2.1")
