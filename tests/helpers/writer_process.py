"""Writers of hand-made arenas: as the real process, as one that is killed, and in a thread with another storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.checkpoint.writer import Writer, start_writer
from megatrain.contracts.arena import Arena, join_arena, wake_writer
from megatrain.contracts.arena_locks import hold_alone, is_held
from megatrain.contracts.arena_plans import WriterStatus
from megatrain.contracts.errors import CheckpointError
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import wait_until

DEADLINE_S = 20.0


def status_of(arena: Arena) -> WriterStatus | None:
    with suppress(CheckpointError):
        return WriterStatus.read(arena.writer_status)
    return None


def wait_for(arena: Arena, *, persisted: int = 0, failures: int = 0) -> WriterStatus:
    """Return the status of a writer that has done so much since it started."""

    def is_met() -> bool:
        status = status_of(arena)
        return status is not None and (status.num_persisted, status.num_failures) == (persisted, failures)

    wait_until(is_met, f"{persisted} persisted and {failures} failed in {status_of(arena)}", DEADLINE_S)
    status = status_of(arena)
    assert status is not None
    return status


@contextmanager
def running_writer(arena: Arena) -> Iterator[int]:
    """Run the real process until the end of the block, with a worker in the arena; its log lies beside the arena."""
    _, lock = join_arena(arena.root)
    pid = start_writer(arena, arena.root.parent / "writer.log")
    assert pid is not None
    try:
        wait_until(lambda: is_held(arena.writer_lock), "the writer's lock", DEADLINE_S)
        yield pid
    finally:
        lock.release()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_alive(pid), "the end of the writer", DEADLINE_S)


def is_alive(pid: int) -> bool:
    """Say whether a process is there, if only as a zombie."""
    return Path(f"/proc/{pid}").exists()


@contextmanager
def writer_thread(
    arena: Arena, wrap: Callable[[str], object] | None = None, clock_s: Callable[[], float] | None = None
) -> Iterator[threading.Thread]:
    """Run a writer in this process until the end of the block, with a worker in the arena while it lasts."""
    _, workers = join_arena(arena.root)
    lock = hold_alone(arena.writer_lock)
    assert lock is not None
    options: dict[str, object] = {}
    if wrap is not None:
        options["open_checkpoints"] = wrap
    if clock_s is not None:
        options["clock_s"] = clock_s
    writer = Writer(arena, lock, **options)  # type: ignore[arg-type]
    thread = threading.Thread(target=writer.run, daemon=True)
    with lock, workers:
        thread.start()
        try:
            yield thread
        finally:
            writer.stop()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def drain(arena: Arena) -> str:
    """Run a writer process until nothing is due, and return what it said. Nobody else is in the arena."""
    done = subprocess.run(
        [sys.executable, "-m", "megatrain.checkpoint.writer", str(arena.root)],
        cwd=ROOT, timeout=DEADLINE_S, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def nudge(arena: Arena) -> None:
    """Let the writer look now."""
    wake_writer(arena)
