"""Work on blocks in several threads or processes, and return the results in the order of the blocks.

A bounded number of blocks is in work or waits as a result, so a slow consumer bounds the memory. Each process has one
block at a time; a thread of this process gives it the block and takes its result, also while the consumer is busy.
The processes are spawned, not forked, because libraries have threads. They are killed as soon as the results end, also
after an error: their work has no side effects. The kernel kills them when this process exits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from megatrain.contracts.errors import MegatrainError
from megatrain.programs.processes import install_parent_death_guard
from megatrain.programs.thread_limits import thread_error

Block = TypeVar("Block")
Result = TypeVar("Result")

BLOCKS_PER_WORKER = 2
"""One block is in work while the next one waits."""


def in_threads(
    work: Callable[[Block], Result], blocks: Iterable[Block], num_workers: int, *, task: str, hint: str
) -> Generator[tuple[Block, Result]]:
    """Yield each block with its result, in the order of `blocks`. `blocks` is read in the consumer's thread.

    At most `BLOCKS_PER_WORKER * num_workers` blocks are taken from `blocks` before the first result is consumed.
    task: what a thread does, for errors, as in "a thread that packs". hint: what to do when one cannot be started.
    Raises: what `work` raises, in place of the result; MegatrainError when a thread cannot be started.
    """
    with ThreadPoolExecutor(num_workers, "data-worker") as threads:
        yield from _in_order(
            blocks, lambda block: _submitted(threads, partial(work, block), num_workers, task, hint), num_workers
        )


def in_processes(
    work: Callable[[Block], Result], blocks: Iterable[Block], num_workers: int, *, task: str, hint: str
) -> Generator[tuple[Block, Result]]:
    """Do as `in_threads`, in processes. `work`, blocks, results and errors are pickled.

    task: what a process does, for errors, as in "a process that packs". hint: what to do when one is killed, or cannot
    be started. A process begins with one of the first blocks, so a few blocks start a few processes.
    Raises: what `work` raises, with the traceback of the process as a note; MegatrainError when a process ends, or a
    process or thread cannot be started.
    """
    processes: list[_WorkerProcess[Block, Result]] = []
    idle: SimpleQueue[_WorkerProcess[Block, Result]] = SimpleQueue()

    def submit(block: Block) -> Future[Result]:
        if len(processes) < num_workers:
            try:
                process = _WorkerProcess(work)
            except OSError as error:
                number = f"process {len(processes) + 1} of {num_workers}, which {task},"
                raise MegatrainError(f"{number} could not be started: {error.strerror or error}; {hint}") from error
            processes.append(process)
            idle.put(process)
        return _submitted(threads, partial(run, block), num_workers, task, hint)

    def run(block: Block) -> Result:
        process = idle.get()
        try:
            return process.run(block)
        finally:
            # even if it died: a block that gets a dead process fails in the same way, and no thread waits forever
            idle.put(process)

    try:
        with ThreadPoolExecutor(num_workers, "data-worker") as threads:
            try:
                yield from _in_order(blocks, submit, num_workers)
            except _ProcessEndedError as error:
                raise MegatrainError(f"{error.process.end_text(task)}; {hint}") from error
            finally:
                for process in processes:
                    process.kill()  # so the thread that waits for its result ends too
    finally:
        for process in processes:
            process.join()


def _submitted(
    threads: ThreadPoolExecutor, call: Callable[[], Result], num_workers: int, task: str, hint: str
) -> Future[Result]:
    """Submit a call. Raises: MegatrainError when the thread that would carry it out cannot be started."""
    try:
        return threads.submit(call)
    except RuntimeError as error:  # the pool starts a thread at its first calls
        raise thread_error(f"one of {num_workers} threads, of which each {task},", error, hint) from error


def _in_order(
    blocks: Iterable[Block], submit: Callable[[Block], Future[Result]], num_workers: int
) -> Generator[tuple[Block, Result]]:
    waiting: deque[tuple[Block, Future[Result]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, submit(block)))
            if len(waiting) == BLOCKS_PER_WORKER * num_workers:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    finally:
        for _, result in waiting:
            result.cancel()


class _WorkerProcess(Generic[Block, Result]):
    """A process that works on one block at a time. One thread at a time may call `run`."""

    def __init__(self, work: Callable[[Block], Result]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()  # the process has the only other end, so its death is an end of file here

    def run(self, block: Block) -> Result:
        """Raises: what the work raises; _ProcessEndedError."""
        answer: tuple[Any, Exception | None]
        try:
            self._connection.send(block)
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise _ProcessEndedError(self) from error
        result, failure = answer
        if failure is not None:
            raise failure
        found: Result = result
        return found

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._process.join()
        self._connection.close()

    def end_text(self, task: str) -> str:
        """Return how this process ended."""
        self._process.join()
        code, name = self._process.exitcode, f"process {self._process.pid}, which {task},"
        if code is None or code >= 0:
            return f"{name} ended with exit code {code}; its last lines of output have the reason"
        reason = ", perhaps because the machine ran out of memory" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {signal.Signals(-code).name}{reason}"


class _ProcessEndedError(Exception):
    def __init__(self, process: _WorkerProcess[Any, Any]) -> None:
        super().__init__()
        self.process = process


def _serve(connection: Connection, work: Callable[[Any], Any], parent: int) -> None:
    """Answer each block with (result, None) or (None, error), until the other end closes."""
    install_parent_death_guard(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent kills its children
    with suppress(EOFError, ConnectionError):
        while True:
            block = connection.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = work(block), None
            except Exception as error:  # noqa: BLE001 -- the parent raises it
                error.add_note(traceback.format_exc())
                answer = None, error
            connection.send(answer)
