"""The producer: a process that prepares pictures for programs that ask it by sample number.

    python -m megatrain.data.pictures.producer LISTENER SECRET NOTE ENDS DECODER THREADS DIRECTORY...

DIRECTORY: shards and their index. LISTENER and SECRET: descriptors of a listening socket and of a file that begins
with the secret, which the program that starts the producer (producers.py) keeps open, so that the address stays the
same when it starts the producer again. NOTE and ENDS: descriptors of the files of a DecodingRecord. The producer is
started by exec: a process that is forked after a pipeline of DALI has run hangs. Its only state is the request that it
works on, so it may be killed at any moment.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatrain.contracts.errors import CommunicationError, DataError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.data.pictures.decoder import PictureDecoder
from megatrain.data.pictures.decoders import make_decoder
from megatrain.data.pictures.decoding_record import DecodingRecord
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.preparation import PreparedPicture, prepared_pictures
from megatrain.data.pictures.protocol import PRODUCER_LIMITS, AnswerHead, PictureRequest, send_answer, send_refusal
from megatrain.data.pictures.shard_reader import ShardReader
from megatrain.peers.link import SECRET_BYTES, PeerConnection
from megatrain.peers.server import PeerServer
from megatrain.programs.background import lower_process_priority
from megatrain.programs.own_output import keep_own_log, log_line

_NICENESS = 0
_log = partial(log_line, "picture producer")
_END = None
"""Follows the last picture of an answer."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A request, and the queue for its pictures, for the error that ends them, and for the mark of the end."""

    request: PictureRequest
    answers: queue.SimpleQueue[PreparedPicture | DataError | None] = field(default_factory=queue.SimpleQueue)

    def pictures(self) -> Iterator[PreparedPicture]:
        while (answer := self.answers.get()) is not _END:
            if isinstance(answer, DataError):
                raise answer
            yield answer


class Producer:
    """Prepares pictures in one thread, in the order of the requests. Each connection has a thread that sends them."""

    def __init__(self, indexes: Sequence[PictureIndex], decoder: PictureDecoder, record: DecodingRecord) -> None:
        self._readers = {index.digest: ShardReader(index) for index in indexes}
        self._decoder = decoder
        self._record = record
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()

    def serve(self, connection: PeerConnection) -> None:
        """Answer the request of a connection. For the threads of a server."""
        with suppress(CommunicationError):  # the client has gone; it asks again if it needs the pictures
            message = connection.receive_message()
            try:
                request = PictureRequest.decode(message)
                self._check(request)
            except DataError as error:
                send_refusal(connection, str(error))
                return
            job = _Job(request)
            head = AnswerHead(self._decoder.identity, self._jobs.qsize())
            self._jobs.put(job)
            send_answer(connection, request, head, job.pictures())

    def run(self) -> NoReturn:
        """Prepare what is asked for, without end. For the main thread: DALI stays in the thread that loaded it."""
        while True:
            job = self._jobs.get()
            try:
                for picture in self._prepared(job.request):
                    job.answers.put(picture)
            except DataError as error:
                job.answers.put(error)
            job.answers.put(_END)

    def _prepared(self, request: PictureRequest) -> Iterator[PreparedPicture]:
        reader = self._readers[request.data]
        for part in self._record.parts(request.data, request.numbers):
            if part.given_up:
                (number,) = part.numbers
                bad = reader.bad(number, f"the decoder crashed: its process {part.given_up}")
                yield PreparedPicture(number, None, bad=bad)
                continue
            with self._record.working(request.data, part.numbers):
                yield from prepared_pictures(reader, self._decoder, request.format, part.numbers)

    def _check(self, request: PictureRequest) -> None:
        if request.data not in self._readers:
            indexes = [reader.index for reader in self._readers.values()]
            served = ", ".join(f"{index.path} has the digest {index.digest[:12]}..." for index in indexes)
            raise DataError(
                f"{served}, and pictures of {request.data[:12]}... are asked for; use the same shards on all hosts, "
                "and index them again"
            )


def serve_pictures(
    directories: Sequence[Path], descriptors: Sequence[int], make_decoder: Callable[[], PictureDecoder]
) -> int:
    """Serve the pictures of some directories, without end. descriptors: the four that producers.MakeCommand gets.

    Returns the exit code of the program when the index or the decoder cannot be used, which the log explains.
    """
    lower_process_priority(_NICENESS)  # use all cores: the rank that started this process may be bound to some
    listener, secret, note, ends = descriptors
    try:
        indexes = [PictureIndex(directory) for directory in directories]
        producer = Producer(indexes, make_decoder(), DecodingRecord(note, ends))
    except MegatrainError as error:
        _log(f"ended: {error}")
        return error.exit_code
    _log(f"serves {', '.join(map(str, directories))}")
    # Never closed: a shutdown would close the socket for the next producer too.
    PeerServer(
        socket.socket(fileno=listener), os.pread(secret, SECRET_BYTES, 0), producer.serve, PRODUCER_LIMITS,
        has_low_priority=False, patience_s=PRODUCER_LIMITS.authentication_s,
    )  # fmt: skip
    producer.run()


def main(arguments: list[str]) -> int:
    """Run a producer. Returns the exit code."""
    try:
        listener, secret, note, ends, decoder, threads, first, *others = arguments
        descriptors, num_threads = [int(one) for one in (listener, secret, note, ends)], int(threads)
    except ValueError:
        arguments_text = "LISTENER SECRET NOTE ENDS DECODER THREADS DIRECTORY..."
        print(f"usage: python -m megatrain.data.pictures.producer {arguments_text}", file=sys.stderr)
        return ExitCode.USAGE
    directories = [Path(one) for one in (first, *others)]
    return serve_pictures(directories, descriptors, lambda: make_decoder(decoder, num_threads))


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main(sys.argv[1:]))
