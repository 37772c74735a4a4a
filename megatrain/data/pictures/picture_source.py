"""Pictures by sample number, from any number of producers. The result depends on the numbers alone.

The process that reads a step asks for its pictures. The numbers of a call are divided into requests, which go to
whichever producer is free. A request that fails, because its producer was killed or its answer was wrong, is sent
again, to any producer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CommunicationError, DataError, UnreachableError
from megatrain.contracts.pauses import growing_pauses
from megatrain.data.pictures.bad_picture import BadPicture, BadPictureError
from megatrain.data.pictures.picture_format import REFUSE, PictureFormat
from megatrain.data.pictures.preparation import PreparedPicture
from megatrain.data.pictures.protocol import PRODUCER_LIMITS, AnswerReader, PictureRequest
from megatrain.data.pictures.requests import PictureRequests, TakenNumbers
from megatrain.data.producer_work import ProducerWork, ProducerWorks
from megatrain.peers.link import PeerAddress, PeerConnection, connect_peer

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_REQUESTS_OF_PRODUCER = 2
"""Requests that a producer gets at a time: it decodes for one while it sends the answer to the other."""
_Answer = list[PreparedPicture]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Producers:
    """The producers that are asked for pictures. secret: producers and this process authenticate each other with it.

    problem: returns why no producer can ever answer; empty while one may. failure: returns how a producer failed
    last; empty if that is not known. patience_s: how long a call waits without any answer.
    """

    addresses: Sequence[PeerAddress]
    secret: bytes
    problem: Callable[[], str] = str
    failure: Callable[[], str] = str
    patience_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of some samples, in the order of their numbers.

    Shapes: patches [N, patches, patch_values]. bad: the samples that were replaced; their patches are 0, and their
    captions are empty. works: what each producer did, in the order of the producers' addresses.
    """

    patches_NPV: NDArray[np.uint8]
    captions: tuple[str, ...]
    bad: tuple[BadPicture, ...]
    works: ProducerWorks


class PictureSource(Closable):
    """Asks producers for the pictures of one index, in one format. For use by one thread.

    data: the digest of the index. bad_pictures: one of BAD_PICTURES. decoder: what all producers must decode with;
    empty: what the first that answers decodes with.
    """

    def __init__(
        self,
        data: str,
        picture_format: PictureFormat,
        producers: Producers,
        bad_pictures: str = REFUSE,
        decoder: str = "",
    ) -> None:
        self._data = data
        self._format = picture_format
        self._producers = producers
        self._bad_pictures = bad_pictures
        self._asked = [
            _AskedProducer(number, address)
            for number, address in enumerate(producers.addresses)
            for _ in range(_REQUESTS_OF_PRODUCER)
        ]
        self._decoders = _SameDecoder(decoder)
        self._work: PictureRequests | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._connections: WeakSet[PeerConnection] = WeakSet()
        """The connections of running requests; ended ones may still be in it."""
        self._threads = ThreadPoolExecutor(len(self._asked), thread_name_prefix="picture-source")

    def patches(self, numbers: Sequence[int]) -> Pictures:
        """Return the pictures of these samples.

        Raises: BadPictureError with bad_pictures="refuse", for the first number whose picture cannot be used;
        UnreachableError when no producer answers; DataError when a producer has other data or decodes in another way,
        when no producer can ever answer, or when the source is closed.
        """
        shape = (len(numbers), self._format.num_patches, self._format.patch_values)
        patches_NPV = np.empty(shape, np.uint8)
        work = self._work = PictureRequests(numbers)
        counts = _Counts(len(self._producers.addresses))
        # from here on, `close` stops the work
        asking = [] if self._is_closed else self._start(work, counts, patches_NPV)
        try:
            for one in asking:
                one.result()
        finally:
            work.stop()
        if self._is_closed:
            raise DataError("the source of pictures is closed")
        pictures = work.results()
        bad = tuple(picture.bad for picture in pictures if picture.bad is not None)
        if bad and self._bad_pictures == REFUSE:
            raise BadPictureError(bad[0])
        return Pictures(patches_NPV, tuple(picture.caption for picture in pictures), bad, counts.works())

    def decoder(self) -> str:
        """Return what the producers decode with. Asks for a picture. Raises: as `patches`."""
        self.patches([0])
        return self._decoders.expected

    def close(self) -> None:
        """End the requests, and a call of `patches` in another thread."""
        self._is_closed = True
        if self._work is not None:
            self._work.stop()
        with self._lock:
            for connection in self._connections:
                connection.cut()  # a producer that does not answer must not delay the end
        self._threads.shutdown(wait=False)

    def _start(self, work: PictureRequests, counts: _Counts, patches_NPV: NDArray[np.uint8]) -> list[Future[None]]:
        try:
            return [self._threads.submit(self._ask, asked, work, counts, patches_NPV) for asked in self._asked]
        except RuntimeError:
            if not self._is_closed:
                raise
            return []

    def _ask(
        self, asked: _AskedProducer, work: PictureRequests, counts: _Counts, patches_NPV: NDArray[np.uint8]
    ) -> None:
        """Send one producer the requests that no other one works on, until all are answered."""
        try:
            while (taken := work.take(asked.ready_s)) is not None:
                started_ns = time.monotonic_ns()
                try:
                    pictures, num_waiting = self._answer(asked.address, taken, patches_NPV)
                    counts.add_answer(asked.number, started_ns, pictures, num_waiting)
                    work.store(taken, pictures)
                    asked.has_answered()
                except CommunicationError as error:
                    counts.add_failure(asked.number, started_ns)
                    asked.has_failed(error)
                    work.give_back(taken)
                    self._check_producers(work, error)
        except BaseException:
            work.stop()
            raise

    def _check_producers(self, work: PictureRequests, error: CommunicationError) -> None:
        """Raise an error when it makes no sense to ask again."""
        producers = self._producers
        problem = producers.problem()
        if problem:
            raise DataError(problem)
        if work.seconds_without_answer() > producers.patience_s:
            failure = producers.failure()
            hint = "start the producers, or correct their addresses"
            if failure:
                hint = f"the last failure of one: {failure}; fix the cause"
            raise UnreachableError(
                f"no producer of pictures has answered for {producers.patience_s:.0f} s; {error}; {hint}"
            )

    def _answer(self, address: PeerAddress, taken: TakenNumbers, patches_NPV: NDArray[np.uint8]) -> tuple[_Answer, int]:
        """Return the pictures of a request, and how many requests waited at the producer."""
        request = PictureRequest(self._data, self._format, taken.numbers)
        with connect_peer(address, self._producers.secret, PRODUCER_LIMITS, self._has_connected) as connection:
            connection.send_message(request.encode())
            answer = AnswerReader(connection, request)
            self._decoders.check(address, answer.head.decoder)
            pictures = answer.read_into(patches_NPV[taken.first : taken.first + len(taken.numbers)])
            return pictures, answer.head.num_waiting

    def _has_connected(self, connection: PeerConnection) -> None:
        with self._lock:
            self._connections.add(connection)
            if self._is_closed:
                connection.cut()


class _AskedProducer:
    """One of the requests that a producer gets at a time, and when (time.monotonic) the producer may be asked again.

    After each failure in a row the pause is longer: a host that is gone must not hold up requests that others can
    answer.
    """

    def __init__(self, number: int, address: PeerAddress) -> None:
        self.number = number
        self.address = address
        self.ready_s = 0.0
        self._pauses: Iterator[float] | None = None
        """The pauses after the failures in a row; None after an answer."""

    def has_answered(self) -> None:
        if self._pauses is not None:
            _logger.warning("picture producer %d at %s answers again", self.number, self.address)
        self._pauses = None

    def has_failed(self, error: CommunicationError) -> None:
        if self._pauses is None:
            self._pauses = growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            _logger.warning("picture producer %d: %s; the request is sent again", self.number, error)
        self.ready_s = time.monotonic() + next(self._pauses)


class _Counts:
    """What each producer has done in a call of `patches`. Thread-safe."""

    def __init__(self, num_producers: int) -> None:
        self._lock = threading.Lock()
        self._works = [ProducerWork()] * num_producers

    def works(self) -> ProducerWorks:
        with self._lock:
            return tuple(self._works)

    def add_answer(self, number: int, started_ns: int, pictures: _Answer, num_waiting: int) -> None:
        """Count a request that was sent at `started_ns` and is answered now."""
        patches = [picture.patches_PV for picture in pictures if picture.patches_PV is not None]
        num_bytes = sum(one.nbytes for one in patches) + sum(len(picture.caption.encode()) for picture in pictures)
        duration_ns = time.monotonic_ns() - started_ns
        self._add(
            number,
            ProducerWork(started_ns, duration_ns, len(pictures), num_bytes, 1, 0, duration_ns, num_waiting),
        )

    def add_failure(self, number: int, started_ns: int) -> None:
        """Count a request that was sent at `started_ns` and has failed now."""
        self._add(number, ProducerWork(started_ns, time.monotonic_ns() - started_ns, num_failed=1))

    def _add(self, number: int, work: ProducerWork) -> None:
        with self._lock:
            self._works[number] = self._works[number].joined(work)


class _SameDecoder:
    """Checks that all producers decode with the same program, because two programs make different pixels. expected: the
    identity of the program; empty: not known yet."""

    def __init__(self, expected: str) -> None:
        self._lock = threading.Lock()
        self.expected = expected
        self._of = "this run"

    def check(self, address: PeerAddress, decoder: str) -> None:
        """Raises: DataError naming both producers."""
        with self._lock:
            if not self.expected:
                self.expected, self._of = decoder, f"the one at {address}"
        if decoder != self.expected:
            raise DataError(
                f"the producer at {address} decodes with {decoder}, and {self._of} with {self.expected}: a picture "
                "would depend on who decodes it; use the same decoder in all producers"
            )
