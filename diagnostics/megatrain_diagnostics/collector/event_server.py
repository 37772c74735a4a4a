"""The Flight server: one stream a host, and a clock to compare with.

A stream is read by Flight's own thread and answered by one of ours, for a host that does not read its answers must
delay nobody. Two threads must never write to one stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from megatrain.contracts.record import encode
from megatrain_diagnostics.collector.ingest import Ingest, Session
from megatrain_diagnostics.wire.authentication import DaemonAuthentication, peer_of
from megatrain_diagnostics.wire.connection import location_of
from megatrain_diagnostics.wire.messages import (
    ANSWER_SCHEMA,
    CLOCK_ACTION,
    COMMANDS_SERVED,
    Acknowledgement,
    ClockAnswer,
)

_POLL_S = 60.0
_LAST_WAIT_S = 5.0


class EventServer(flight.FlightServerBase):  # type: ignore[misc] # pyarrow has no types
    """Serves from construction on, until `stop`."""

    def __init__(
        self, ingest: Ingest, address: str, port: int, token: str, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Listen. Port 0: any that is free. Raises: OSError when the address cannot be had."""
        self._ingest, self._clock_ns = ingest, clock_ns
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._num_streams = 0
        authentication = DaemonAuthentication(token, ingest.ledger.note_refused_handshake)
        super().__init__(location_of(address, port), auth_handler=authentication)

    def stop(self, timeout_s: float) -> bool:
        """Ask all hosts to end their streams; return whether they did in time, and the server is down.

        When one did not, a thread still reads from it, and only the end of the process ends that.
        """
        self._closing.set()
        self._ingest.wake_sessions()
        with self._changed:
            have_ended = self._changed.wait_for(lambda: self._num_streams == 0, timeout_s)
        if have_ended:
            self.shutdown()
        return have_ended

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        if descriptor.command not in COMMANDS_SERVED:
            raise flight.FlightServerError(
                f"not a stream of this daemon's: {descriptor.command!r}; expected one of {COMMANDS_SERVED}"
            )
        if self._closing.is_set():
            raise flight.FlightUnavailableError("the daemon ends")
        session = self._ingest.session(peer_of(context.peer_identity()))
        self._count(1, session.name.host)
        try:
            self._serve(session, reader, writer)
        finally:
            self._count(-1, session.name.host)

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        received_ns = self._clock_ns()
        if action.type != CLOCK_ACTION:
            raise flight.FlightServerError(f"action {action.type!r} is not known")
        yield flight.Result(encode(ClockAnswer(received_ns, self._clock_ns())))

    def _serve(self, session: Session, reader: Any, writer: Any) -> None:
        writer.begin(ANSWER_SCHEMA)
        has_ended = threading.Event()
        answers = threading.Thread(target=self._answer, args=(session, writer, has_ended), daemon=True)
        answers.start()
        try:
            self._read(session, reader)
            # the host has said all: it waits for the last acknowledgement
            deadline = time.monotonic() + _LAST_WAIT_S
            while session.acknowledged < session.received and (left_s := deadline - time.monotonic()) > 0:
                session.wait(session.acknowledged, left_s)
        finally:
            has_ended.set()
            session.wake()
            answers.join()

    def _read(self, session: Session, reader: Any) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except (StopIteration, flight.FlightError, pa.ArrowException):
                return  # it said that it has ended, or is gone
            metadata = chunk.app_metadata
            self._ingest.take(session, b"" if metadata is None else metadata.to_pybytes(), chunk.data)

    def _answer(self, session: Session, writer: Any, has_ended: threading.Event) -> None:
        told, is_closing_told = -1, False
        while True:
            is_last = has_ended.is_set()
            is_closing = self._closing.is_set()
            through = session.acknowledged
            if through > told or (is_closing and not is_closing_told):
                try:
                    writer.write_metadata(pa.py_buffer(encode(Acknowledgement(through, is_closing))))
                except (flight.FlightError, pa.ArrowException, OSError):
                    return  # it is gone, and hears it on its next stream
                told, is_closing_told = through, is_closing
            if is_last:
                return
            over = (has_ended,) if is_closing_told else (has_ended, self._closing)
            session.wait(told, _POLL_S, over)

    def _count(self, change: int, host: str) -> None:
        self._ingest.ledger.note_stream(change, host)
        with self._changed:
            self._num_streams += change
            self._changed.notify_all()
