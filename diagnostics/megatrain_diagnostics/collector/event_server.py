"""The server of event streams. Only authenticated peers can stream; other connections cost little memory and time.

Each connection has a thread that reads, and after authentication another one that answers: a host that does not read
its answers must not delay other hosts. A connection that has not yet proved that it has the token is called a stranger.
It has ten seconds for the proof, in frames of at most 4,096 bytes. At most 128 strangers are connected; a further one
closes the oldest.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.collector.ingest import Ingest, SenderSession
from megatrain_diagnostics.wire.authentication import SenderName, authenticate_sender
from megatrain_diagnostics.wire.frames import FrameKind, FrameSocket, WireError
from megatrain_diagnostics.wire.messages import MAX_FRAME_BYTES, Acknowledgment, ClockAnswer, ClockQuestion

_logger = logging.getLogger(__name__)
_BACKLOG = 1024
"""Large, because all hosts of a job connect at the same time when a daemon is replaced."""
MAX_STRANGERS = 128
HANDSHAKE_S = 10.0
_ACCEPT_S = 0.5
_ENDED_BY_PEER = (errno.ECONNABORTED, errno.EPROTO)
"""Errors of `accept` for a connection that its peer has already ended."""
_HEARTBEAT_S = 5.0
"""Longest interval between acknowledgments: hosts close a stream after four times this time without a frame."""
_SILENCE_S = 120.0
"""Limit of the time without a frame from a host, which asks for the clock every half minute."""
_SEND_S = 10.0
_LAST_WAIT_S = 5.0


class EventServer:
    """Serves from its construction until `stop`."""

    def __init__(
        self, ingest: Ingest, address: str, port: int, token: str, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Listen. Port 0: any free port. Raises: OSError when the address is not available."""
        self._ingest, self._token, self._clock_ns = ingest, token, clock_ns
        self.address = address
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._strangers: OrderedDict[FrameSocket, float] = OrderedDict()
        """Connection -> monotonic time at which it was opened; the oldest first."""
        self._streams: set[FrameSocket] = set()
        self._refused: int | None = None
        """Errno of the last logged failure to accept a connection."""
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._listening = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        self._listening.settimeout(_ACCEPT_S)
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="event streams", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask all hosts to end their streams; after `timeout_s` close those that remain."""
        self._closing.set()
        self._thread.join()
        self._listening.close()
        self._ingest.wake_sessions()
        with self._changed:
            self._changed.wait_for(lambda: not self._streams, timeout_s)
            for connection in (*self._streams, *self._strangers):
                connection.shut()
            self._changed.wait_for(lambda: not self._streams, timeout_s)

    def _accept(self) -> None:
        while not self._closing.is_set():
            connected = self._next()
            if connected is not None:
                with suppress(OSError, RuntimeError):  # the peer has already closed it, or no thread can be started
                    self._begin(connected)
            self._close_unauthenticated(time.monotonic() - HANDSHAKE_S, MAX_STRANGERS)

    def _next(self) -> socket.socket | None:
        """Return the next connection; None if there is none within a timeout, or it cannot be accepted."""
        try:
            return self._listening.accept()[0]
        except TimeoutError:
            return None
        except OSError as error:
            if error.errno not in _ENDED_BY_PEER:
                # the missing resources become free only with time: an immediate retry would keep a core busy
                if error.errno != self._refused:
                    _logger.warning("event streams of hosts cannot be accepted: %s", error.strerror)
                self._refused = error.errno
                self._closing.wait(_ACCEPT_S)
            return None

    def _begin(self, connected: socket.socket) -> None:
        connection = FrameSocket(connected)
        connection.limit_silence(receive_s=HANDSHAKE_S, send_s=_SEND_S)
        with self._changed:
            self._strangers[connection] = time.monotonic()
        threading.Thread(target=self._serve_sender, args=(connection,), name="event stream", daemon=True).start()

    def _close_unauthenticated(self, oldest_s: float, most: int) -> None:
        """Close strangers that connected before `oldest_s`, and the oldest ones beyond `most`."""
        with self._changed:
            for connection, since_s in list(self._strangers.items()):
                if since_s > oldest_s and len(self._strangers) <= most:
                    return
                del self._strangers[connection]
                connection.shut()

    def _serve_sender(self, connection: FrameSocket) -> None:
        try:
            name = authenticate_sender(connection, self._token)
            self._stream(connection, name)
        except OSError as error:
            self._ingest.statistics.count_refused_handshake(str(error))
            connection.refuse(str(error))
        finally:
            with self._changed:
                self._strangers.pop(connection, None)
            connection.close()

    def _stream(self, connection: FrameSocket, name: SenderName) -> None:
        with self._changed:
            self._strangers.pop(connection, None)
            self._streams.add(connection)
        self._ingest.statistics.count_stream(1, name.host)
        try:
            self._serve(connection, self._ingest.session(name))
        finally:
            self._ingest.statistics.count_stream(-1, name.host)
            with self._changed:
                self._streams.discard(connection)
                self._changed.notify_all()

    def _serve(self, connection: FrameSocket, session: SenderSession) -> None:
        connection.limit_silence(receive_s=_SILENCE_S)
        has_ended = threading.Event()
        answers = threading.Thread(target=self._answer, args=(session, connection, has_ended), daemon=True)
        answers.start()
        try:
            self._read(session, connection)
            # the host has sent everything: it waits for the last acknowledgment
            deadline = time.monotonic() + _LAST_WAIT_S
            while session.acknowledged < session.received and (left_s := deadline - time.monotonic()) > 0:
                session.wait(session.acknowledged, left_s)
        finally:
            has_ended.set()
            session.wake()
            answers.join()

    def _read(self, session: SenderSession, connection: FrameSocket) -> None:
        """Take batches until the host ends its stream, or the connection is lost."""
        try:
            while (frame := connection.receive(MAX_FRAME_BYTES)) is not None:
                if frame.kind is FrameKind.BATCH:
                    self._ingest.take(session, frame.header, frame.content)
                elif frame.kind is FrameKind.CLOCK:
                    received_ns = self._clock_ns()
                    number = decode(ClockQuestion, frame.header, "a question for the clock").number
                    connection.send(FrameKind.CLOCK, encode(ClockAnswer(received_ns, self._clock_ns(), number)))
                elif frame.kind is FrameKind.END:
                    return
                else:
                    raise WireError(f"unexpected frame {frame.kind.name} in a host's stream")
        except (CoordinationError, OSError) as error:
            connection.refuse(str(error))

    def _answer(self, session: SenderSession, connection: FrameSocket, has_ended: threading.Event) -> None:
        while True:
            is_last, is_closing = has_ended.is_set(), self._closing.is_set()
            through = session.acknowledged
            try:
                connection.send(FrameKind.ACKNOWLEDGMENT, encode(Acknowledgment(through, is_closing)))
            except OSError:
                connection.shut()  # the host has disconnected; it gets the answer on its next stream
                return
            if is_last:
                return
            session.wait(through, _HEARTBEAT_S, (has_ended,) if is_closing else (has_ended, self._closing))
