"""One authenticated stream to one daemon: one thread sends batches, another reads acknowledgments."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import pyarrow as pa

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.wire.authentication import SenderName, authenticate_to_daemon
from megatrain_diagnostics.wire.clock_exchange import ClockReading, read_clock
from megatrain_diagnostics.wire.frames import FrameKind, FrameSocket, WireError
from megatrain_diagnostics.wire.messages import Acknowledgment, BatchHeader, ClockAnswer, ClockQuestion

CONNECTION_ERRORS = (CoordinationError, OSError)
"""Errors that a connection to the daemon can raise."""
_HANDSHAKE_S = 10.0
_SILENCE_S = 20.0
"""Limit of the time without a frame from the daemon, which sends at least one every 5 s."""
_CLOCK_S = 5.0
_NUM_QUESTIONS = 8


class DaemonConnection:
    """An open stream. Methods that send raise CONNECTION_ERRORS."""

    def __init__(
        self,
        record: DaemonRecord,
        name: SenderName,
        on_answer: Callable[[Acknowledgment], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_answer, self._on_end = on_answer, on_end
        self._problem = ""
        self._is_open = True
        self._num_asked = 0
        self._clock_answers: queue.SimpleQueue[ClockAnswer | None] = queue.SimpleQueue()
        self._frames = FrameSocket(socket.create_connection((record.address, record.port), timeout=_HANDSHAKE_S))
        try:
            self._frames.limit_silence(receive_s=_HANDSHAKE_S, send_s=_HANDSHAKE_S)
            authenticate_to_daemon(self._frames, name, record.token)
            self._frames.limit_silence(receive_s=_SILENCE_S, send_s=0)
        except CONNECTION_ERRORS:
            self._frames.close()
            raise
        self._thread = threading.Thread(target=self._listen, name="acknowledgments", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def problem(self) -> str:
        """The reason why the stream ended; empty while it is open, and if it ended normally."""
        return self._problem

    def send(self, header: BatchHeader, content: pa.Buffer) -> None:
        """Send a batch. Blocks while the daemon does not read."""
        self._frames.send(FrameKind.BATCH, encode(header), content)

    def clock(self, clock_ns: Callable[[], int]) -> ClockReading:
        """Compare a clock of this host with the daemon's. Raises: TimeoutError if the daemon does not answer."""
        return read_clock(self._ask_clock, clock_ns, _NUM_QUESTIONS)

    def finish(self) -> None:
        """Send the END frame: no more batches follow. The daemon then closes the stream."""
        self._frames.send(FrameKind.END)

    def wait(self, timeout_s: float) -> None:
        """Wait until the stream has ended, or `timeout_s` has passed."""
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """Close the stream now. Acknowledgments in transit are lost; the daemon detects repeated batches by number."""
        self._frames.shut()
        self._thread.join()
        self._frames.close()

    def _ask_clock(self) -> ClockAnswer:
        self._num_asked += 1
        self._frames.send(FrameKind.CLOCK, encode(ClockQuestion(self._num_asked)))
        while True:
            try:
                answer = self._clock_answers.get(timeout=_CLOCK_S)
            except queue.Empty:
                raise TimeoutError(
                    f"the daemon has not answered a request for its clock within {_CLOCK_S:g} s"
                ) from None
            if answer is None:
                raise WireError(self._problem or "the daemon has ended the stream")
            if answer.question == self._num_asked:  # skips late answers to earlier questions
                return answer

    def _listen(self) -> None:
        try:
            while (frame := self._frames.receive()) is not None:
                if frame.kind is FrameKind.ACKNOWLEDGMENT:
                    self._on_answer(decode(Acknowledgment, frame.header, "the daemon's acknowledgment"))
                elif frame.kind is FrameKind.CLOCK:
                    self._clock_answers.put(decode(ClockAnswer, frame.header, "the daemon's clock"))
        except CONNECTION_ERRORS as error:
            self._problem = str(error)
        finally:
            self._is_open = False
            self._frames.shut()  # a blocked `send` then fails
            self._clock_answers.put(None)
            self._on_end()
