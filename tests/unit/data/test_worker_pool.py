"""Work in threads and processes: the order of results, the number of items in progress, and the end after a failure."""

from __future__ import annotations

import itertools
import os
import resource
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import DataError, MegatrainError
from megatrain.data.worker_pool import BLOCKS_PER_WORKER, in_processes, in_threads
from tests.helpers.child_process import in_child
from tests.helpers.pool_work import BAD, end, hang, hold, kill_self, refuse, square
from tests.helpers.processes import ChildProcesses
from tests.helpers.thread_starts import no_thread_starts

NUM_WORKERS = 2

Pool = Callable[[Callable[[int], Any], Iterable[int], int], Generator[tuple[int, Any]]]
processes: Pool = partial(in_processes, task="counts", hint="count again")
threads: Pool = partial(in_threads, task="counts", hint="count again")
both = pytest.mark.parametrize("pool", [threads, processes], ids=["threads", "processes"])


@pytest.fixture(autouse=True)
def all_processes_end() -> Iterator[None]:
    """Check that each process of the test has ended."""
    children = ChildProcesses()
    yield
    assert children.running() == set()


def counted(taken: list[int]) -> Iterator[int]:
    for number in itertools.count():
        taken.append(number)
        yield number


@both
def test_results_are_in_order_and_few_blocks_in_work(pool: Pool) -> None:
    taken: list[int] = []
    with closing(pool(square, counted(taken), NUM_WORKERS)) as results:
        for number in range(12):
            assert next(results) == (number, number * number)
            assert len(taken) <= number + BLOCKS_PER_WORKER * NUM_WORKERS
    assert list(pool(square, range(7), NUM_WORKERS)) == [(number, number * number) for number in range(7)]
    assert list(pool(square, [], NUM_WORKERS)) == []


@both
def test_an_error_comes_in_place_of_its_result(pool: Pool) -> None:
    results = pool(refuse, itertools.count(), NUM_WORKERS)
    assert list(itertools.islice(results, BAD)) == [(number, number) for number in range(BAD)]
    with pytest.raises(DataError, match=f"cannot count {BAD}") as refused:
        next(results)
    if pool is processes:
        assert "in refuse" in "".join(refused.value.__notes__)


@pytest.mark.slow(kept=["killed"])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        (partial(kill_self, signal.SIGKILL), "was killed by SIGKILL, perhaps because the machine ran out of memory"),
        (partial(kill_self, signal.SIGTERM), "was killed by SIGTERM; count again"),
        (partial(os._exit, 3), "ended with exit code 3; its last lines of output have the reason; count again"),
    ],
    ids=["killed", "stopped", "exited"],
)
def test_a_process_that_ends_is_named_with_the_hint(how: Callable[[], object], text: str) -> None:
    results = processes(partial(end, how), itertools.count(), NUM_WORKERS)
    pids = {str(pid) for _, pid in itertools.islice(results, BAD)}
    with pytest.raises(MegatrainError) as ended:
        next(results)
    words = str(ended.value).split()
    assert (words[0], words[2:4]) == ("process", ["which", "counts,"])
    assert words[1].rstrip(",") in pids
    assert text in str(ended.value)
    assert str(ended.value).endswith("; count again")


def test_a_process_that_cannot_start_is_named_with_the_hint() -> None:
    """Here, out of open files; out of processes is another OSError of the same call."""

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def blocks() -> Iterator[int]:
        yield 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        yield 1

    def start_two() -> None:
        children = ChildProcesses()
        text = "^process 2 of 2, which counts, could not be started: Too many open files; count again$"
        with pytest.raises(MegatrainError, match=text):
            list(processes(square, blocks(), NUM_WORKERS))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert children.running() == set()

    assert in_child(start_two) == 0


@both
def test_a_thread_that_cannot_start_is_reported_with_the_hint(pool: Pool) -> None:
    children = ChildProcesses()
    text = "^one of 2 threads, of which each counts, could not be started: can't start new thread .*; count again$"
    with no_thread_starts(), pytest.raises(MegatrainError, match=text):
        list(pool(square, range(9), NUM_WORKERS))
    assert children.running() == set()


def test_work_that_hangs_ends_with_the_results() -> None:
    results = processes(hang, itertools.count(), NUM_WORKERS)
    assert next(results) == (0, 0)
    results.close()


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "held"
    os.mkfifo(path)
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(held, True)

    def blocks() -> Iterator[int]:
        yield 0
        with path.open("rb"):  # Waits until the process has opened it.
            kill_self(signal.SIGKILL)

    def be_killed() -> None:
        list(processes(partial(hold, path), blocks(), NUM_WORKERS))

    assert in_child(be_killed) == -signal.SIGKILL
    assert os.read(held, 1) == b""  # The end of file arrives when no process has the pipe open.
    os.close(held)
