"""One exchange of a rank, and the runner of all exchanges, which records and starts them and creates their errors.

A group or a channel describes its exchange and submits it to its communicator (communicator.py). The communicator of
each library (nccl.py, gloo.py) determines when an exchange starts and which thread waits for its end.
Source: MegaScale sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatrain.comm.device_stream import DeviceStream
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import CommunicationError
from megatrain.telemetry.recorder import Recorder


class Work(Protocol):
    """The handle that a library returns for a started operation, like torch's dist.Work."""

    def wait(self) -> object:
        """Block until the operation has ended, or make the current stream of the device wait for it."""

    def is_completed(self) -> bool:
        """Whether the operation has ended; False if the library cannot determine it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The calls that carry out one exchange."""

    start: Callable[[], Work | None]
    """Launches the operation; returns None if it runs on the current stream of the device."""
    prepare: Callable[[], None] | None = None
    """Allocates memory for received data, before the start."""
    then: Callable[[], None] | None = None
    """Computes the result from the received data."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, send or receive of this rank."""

    operation: Operation
    group: int
    """The number of the group in the black box."""
    num_bytes: int
    transfer: Transfer
    failure: Callable[[Exception], CommunicationError]
    """Returns the error that names this rank's operation and the ranks involved."""
    chunk: int = -1
    microbatch: int = -1
    link: str = ""
    """Of a send or receive: its direction and peer, such as "to-3". Messages of one link keep their order."""


class Pending:
    """An exchange in progress. `wait` blocks until `result` may be used; a second wait returns at once."""

    __slots__ = ("_finish", "_is_completed", "result")

    def __init__(
        self, result: Tensor, finish: Callable[[], None] | None = None, is_completed: Callable[[], bool] | None = None
    ) -> None:
        """finish: blocks until the end; None if there is nothing to wait for. Without is_completed, `is_done` is False
        until `wait` is called."""
        self.result = result
        self._finish = finish
        self._is_completed = is_completed

    def wait(self) -> Tensor:
        if self._finish is not None:
            finish, self._finish = self._finish, None  # it holds the exchanged tensors: dropping it frees them
            finish()
        return self.result

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None or (self._is_completed is not None and self._is_completed())


class ExchangeRunner:
    """Runs all exchanges of a rank: records and starts them, and turns failures into errors that name the operation.

    before: called with each exchange right before it starts. Tests use it to delay exchanges or to make them fail.
    """

    def __init__(self, recorder: Recorder, before: Callable[[Exchange], None] | None = None) -> None:
        self.recorder = recorder
        self._before = before

    @property
    def starts_at_once(self) -> bool:
        """Whether the submitting thread may start an exchange itself; False if `before` is set: it may block."""
        return self._before is None

    def submit(self, result: Tensor, exchange: Exchange) -> Pending:
        """Start `exchange`, which fills `result`, now. The caller waits for its end.

        Raises: CommunicationError if it cannot be started; the Pending raises later errors.
        """
        token = self.begin_span(exchange)
        work = self.start(exchange)
        self.recorder.launched(token)

        def finish() -> None:
            self.recorder.await_end(token)
            self.finish(exchange, work, token)

        return Pending(result, finish, work.is_completed)

    def submit_on(self, stream: DeviceStream, result: Tensor, exchange: Exchange) -> Pending:
        """Launch `exchange`, which fills `result`, on `stream`. Waiting for it makes the compute stream wait.

        The memory of the exchange belongs to the compute stream. So the Pending keeps it until the wait is queued on
        the compute stream. On the device the span begins when `stream` reaches the exchange, and ends when the exchange
        has ended.
        Raises: CommunicationError if it cannot be launched.
        """
        self._prepare(exchange)  # while the compute stream is current, so that allocated memory belongs to it
        with stream.after_compute():
            token = self.begin_span(exchange)
            work = self.launch(exchange)
            if work is not None:  # torch runs a send or receive on another stream: `stream` waits for it
                work.wait()
            self.recorder.launched(token)
            end = stream.mark()

        def finish() -> None:
            self.recorder.await_end(token)
            end.wait()  # the compute stream waits, the host does not; `then` is launched behind this wait
            if exchange.transfer.then is not None:
                exchange.transfer.then()
            self.recorder.end(token)

        return Pending(result, finish, end.query)

    def begin_span(self, exchange: Exchange, *, is_watched: bool = False) -> int:
        """Open the span of `exchange` and return the span's token. is_watched: a dedicated thread ends the span."""
        return self.recorder.begin(
            exchange.operation,
            chunk=exchange.chunk,
            microbatch=exchange.microbatch,
            num_bytes=exchange.num_bytes,
            group=exchange.group,
            is_watched=is_watched,
        )

    def start(self, exchange: Exchange) -> Work:
        """Start `exchange`. Raises: CommunicationError."""
        self._prepare(exchange)
        work = self.launch(exchange)
        assert work is not None, "without a device each exchange has a Work"
        return work

    def _prepare(self, exchange: Exchange) -> None:
        if self._before is not None:
            self._before(exchange)
        if exchange.transfer.prepare is not None:
            exchange.transfer.prepare()

    def launch(self, exchange: Exchange) -> Work | None:
        """Call the library. Returns None if the operation runs on the current stream. Raises: CommunicationError."""
        try:
            return exchange.transfer.start()
        except torch.OutOfMemoryError:
            raise  # an error of this rank, not of the exchange
        except RuntimeError as error:
            raise exchange.failure(error) from error

    def finish(self, exchange: Exchange, work: Work, token: int) -> None:
        """Wait for the end of `exchange`. Raises: CommunicationError."""
        try:
            work.wait()
        except RuntimeError as error:
            raise exchange.failure(error) from error
        if exchange.transfer.then is not None:
            exchange.transfer.then()
        self.recorder.end(token)
