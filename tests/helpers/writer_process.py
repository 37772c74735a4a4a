"""Writers of arenas that tests write: the real process, one that is killed, and one in a thread with another
storage."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.arena.directory import Arena, join_arena
from megatrain.arena.locks import hold_exclusively, is_held
from megatrain.arena.plans import WriterStatus
from megatrain.checkpoint.host_writer import start_writer
from megatrain.checkpoint.writer import CheckpointWriter
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import CRASHED
from tests.helpers.forked_program import run_forked
from tests.helpers.hooked_location import Hook, HookedLocation
from tests.helpers.waiting import DEADLINE_S, wait_until


def status_of(arena: Arena) -> WriterStatus | None:
    with suppress(CheckpointError):
        return WriterStatus.read(arena.writer_status)
    return None


def wait_for(arena: Arena, *, persisted: int = 0, failures: int = 0) -> WriterStatus:
    """Return the status of a writer when it has done this much since its start."""
    found: list[WriterStatus] = []

    def is_met() -> bool:
        status = status_of(arena)
        if status is None or (status.num_persisted, status.num_failures) != (persisted, failures):
            return False
        found.append(status)
        return True

    wait_until(is_met, f"{persisted} persisted and {failures} failed in {arena.writer_status}")
    return found[0]


def is_alive(pid: int) -> bool:
    """Return whether a process exists, possibly as a zombie."""
    return Path(f"/proc/{pid}").exists()


@contextmanager
def running_writer(arena: Arena) -> Iterator[int]:
    """Run the real process until the end of the block, with a worker in the arena. Its log is beside the arena."""
    _, workers = join_arena(arena.root)
    pid = start_writer(arena, log_of(arena))
    assert pid is not None
    with workers:
        try:
            wait_until(lambda: is_held(arena.writer_lock), "the writer's lock")
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not is_alive(pid), "the end of the writer")


def log_of(arena: Arena) -> Path:
    return arena.root.with_name("writer.log")


@dataclass
class WriterThread:
    """A writer in this process."""

    writer: CheckpointWriter
    thread: threading.Thread

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@contextmanager
def writer_thread(
    arena: Arena,
    hook: Hook = lambda action, path: None,
    clock_s: Callable[[], float] = lambda: 0.0,
    *,
    has_worker: bool = True,
) -> Iterator[WriterThread]:
    """Run a writer in this process until the end of the block. `hook` is called before each of its operations in
    storage."""

    def open_hooked(text: str) -> Location:
        return HookedLocation(LocalLocation(Path(text)), hook)

    lock = hold_exclusively(arena.writer_lock)
    assert lock is not None
    with lock:
        writer = CheckpointWriter(arena, lock, open_hooked, clock_s)
        running = WriterThread(writer, threading.Thread(target=writer.run, daemon=True))
        workers = join_arena(arena.root)[1] if has_worker else None
        running.thread.start()
        try:
            yield running
        finally:
            writer.stop()
            running.join()
            if workers is not None:
                workers.release()


def drain(arena: Arena, preparation: str = "") -> str:
    """Run a writer process until it ends by itself, and return its stderr. No other process uses the arena."""
    script = f"import sys\nfrom megatrain.checkpoint.writer import main\n{preparation}\nsys.exit(main(sys.argv[1:]))"
    done = run_forked(["-c", script, str(arena.root)])
    assert done.returncode == 0, done.stderr
    return done.stderr


_CRASHING = """
import os, sys, threading
from pathlib import Path
from megatrain.checkpoint import writer
from megatrain.arena.directory import open_arena
from megatrain.arena.locks import hold_exclusively
from megatrain.checkpoint_format.local_location import LocalLocation
from tests.helpers.forked_program import run_forked
from tests.helpers.hooked_location import HookedLocation
left, after, lock, say_persist = int(sys.argv[2]), sys.argv[3], threading.Lock(), writer.write_persist

def crash(action, path):
    global left, after
    point = action + " " + path.rpartition("/")[2]
    with lock:
        if action in ("read", "list", "stat"):
            return
        if after:
            after = "" if point == after else after
            return
        if left == 0:
            print(point, flush=True)
            os._exit({crashed})
        left -= 1

def crash_and_say(*arguments):
    crash("persist", "word")
    return say_persist(*arguments)

writer.write_persist = crash_and_say
arena = open_arena(Path(sys.argv[1]))
writer.CheckpointWriter(
    arena, hold_exclusively(arena.writer_lock), lambda text: HookedLocation(LocalLocation(Path(text)), crash)
).run()
"""


def crash_writer(arena: Arena, number: int, after: str = "") -> str | None:
    """Run a writer that ends, as SIGKILL would end it, just before its change `number` to storage or to a slot.

    Changes up to the one called `after` do not count. Return the change that it was about to make, such as "write
    COMMIT"; None if it completed everything before.
    """
    done = run_forked(["-c", _CRASHING.format(crashed=CRASHED), str(arena.root), str(number), after])
    assert done.returncode in (0, CRASHED), done.stderr
    return done.stdout.strip() if done.returncode == CRASHED else None
