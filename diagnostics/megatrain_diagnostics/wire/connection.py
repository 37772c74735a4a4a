"""One authenticated stream to one daemon: batches go up by one thread, acknowledgements are read by another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa
import pyarrow.flight as flight

from megatrain.contracts.diag_records import DaemonRecord
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.record import decode, encode
from megatrain_diagnostics.wire.authentication import HostAuthentication, SenderName
from megatrain_diagnostics.wire.clock_exchange import ClockReading, read_clock
from megatrain_diagnostics.wire.messages import (
    CLOCK_ACTION,
    COMMAND,
    FRAME_SCHEMA,
    Acknowledgement,
    BatchHeader,
    ClockAnswer,
    frame_of,
)

CONNECTION_ERRORS = (flight.FlightError, pa.ArrowException, CoordinationError, OSError)
"""What a connection raises, whatever became of the daemon."""
_HANDSHAKE_S = 10.0
_CLOCK_S = 5.0
_NUM_QUESTIONS = 8
_OPTIONS = [
    # A daemon that froze, or a machine that is gone, answers no ping: then a write that waits for it fails.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Each connection its own: two senders of a process must not share one that breaks.
    ("grpc.use_local_subchannel_pool", 1),
]


class Connection:
    """An open stream. Raises from every method but `cancel`: CONNECTION_ERRORS."""

    def __init__(
        self,
        record: DaemonRecord,
        name: SenderName,
        on_answer: Callable[[Acknowledgement], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_answer, self._on_end = on_answer, on_end
        self._trouble = ""
        self._is_open = True
        self._client = flight.FlightClient(location_of(record.address, record.port), generic_options=_OPTIONS)
        try:
            self._client.authenticate(
                HostAuthentication(name, record.token), options=flight.FlightCallOptions(timeout=_HANDSHAKE_S)
            )
            self._writer, self._reader = self._client.do_exchange(flight.FlightDescriptor.for_command(COMMAND))
            self._writer.begin(FRAME_SCHEMA)
        except CONNECTION_ERRORS:
            self._client.close()
            raise
        self._thread = threading.Thread(target=self._listen, name="acknowledgements", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def trouble(self) -> str:
        """Why it ended; empty while it is open, and where it ended in good order."""
        return self._trouble

    def send(self, header: BatchHeader, content: pa.Buffer) -> None:
        """Send a batch; waits while the daemon takes nothing. For one thread only."""
        self._writer.write_with_metadata(frame_of(content), encode(header))

    def clock(self, clock_ns: Callable[[], int]) -> ClockReading:
        """Compare a clock of this host with the daemon's."""
        options = flight.FlightCallOptions(timeout=_CLOCK_S)

        def ask() -> ClockAnswer:
            answers = self._client.do_action(flight.Action(CLOCK_ACTION, b""), options)
            return decode(ClockAnswer, next(iter(answers)).body.to_pybytes(), "the daemon's clock")

        return read_clock(ask, clock_ns, _NUM_QUESTIONS)

    def finish(self) -> None:
        """Say that no more batches come; the daemon then ends the stream."""
        self._writer.done_writing()

    def wait(self, timeout_s: float) -> None:
        """Return when the stream has ended, or after the time."""
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """End the stream now. Acknowledgements under way are lost, and the batches known by their numbers."""
        self._reader.cancel()
        self._thread.join()
        with suppress(*CONNECTION_ERRORS):  # it says once more how the stream ended
            self._writer.close()
        self._client.close()

    def _listen(self) -> None:
        try:
            while True:
                metadata = self._reader.read_chunk().app_metadata
                if metadata is not None:
                    self._on_answer(decode(Acknowledgement, metadata.to_pybytes(), "the daemon's acknowledgement"))
        except StopIteration:
            pass
        except CONNECTION_ERRORS as error:
            self._trouble = short_reason(error)
        finally:
            self._is_open = False
            self._on_end()


def location_of(address: str, port: int) -> str:
    """Return Flight's way to write an address."""
    return f"grpc://[{address}]:{port}" if ":" in address else f"grpc://{address}:{port}"


def short_reason(error: BaseException) -> str:
    """Return an error of Flight's without what gRPC adds for its own developers."""
    text = str(error).partition(". gRPC client debug context")[0].partition(". Detail:")[0]
    return text.rpartition("error, with message: ")[2].replace("\n", " ") or type(error).__name__
