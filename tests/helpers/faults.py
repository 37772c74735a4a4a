"""The fault injector of checkpoints: ranks and writer processes that are killed at a stated point of the protocol.

A rank kills itself where a RankFault says. A writer, which the workers start as they always do, is another program
under `faulty_writers`: this module, which runs the real writer on a storage that counts what is done to it. It takes
the first of the WriterFaults that are left in a directory, and when it comes to that point

    NN.tree      is a copy of all checkpoints as they are in this moment, and then
    NN.reached   appears; the writer kills itself, or, when it is to be held, waits until there is a file NN.go
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from tests.helpers.hooked_location import HookedLocation
from tests.helpers.waiting import wait_until

_NUM_COPIES = 100
_MISSED_AFTER_S = 0.1
"""The time in which workers detect that a writer was killed, instead of a second."""


@dataclass(frozen=True, slots=True)
class RankFault:
    """Kills a rank (None: all ranks) in its save number `save`, counted from 1.

    begin: before it touches the slot. copy: half-way through the copy. agree: after the copy. seal: when all have
    agreed. call: when all have sealed, and before a writer is called. `when`: it lives until there is such a file,
    which a writer makes: one that has nothing left to do is woken for that at "call".
    """

    rank: int | None
    save: int
    point: Literal["begin", "copy", "agree", "seal", "call"]
    when: str = ""


@dataclass(frozen=True, slots=True)
class WriterFault:
    """Kills or holds a writer before its `action` number `time` at a path that ends like `path`.

    Actions are those of HookedLocation, and `persist`: writing to a slot what became of its snapshot. path: a regular
    expression.
    """

    action: str
    path: str = ""
    time: int = 1
    is_held: bool = False


# In ranks


@contextmanager
def faulty_rank(fault: RankFault, host_ranks: Sequence[int]) -> Iterator[None]:
    """Kill this process at the point of `fault`, if it reaches that. host_ranks: the ranks that share its arena."""
    import pytest

    from megatrain.arena.directory import Arena, wake_writer
    from megatrain.arena.sealed import sealed_by_rank
    from megatrain.checkpoint.arena_slots import ArenaSlot
    from megatrain.checkpoint.image import BoundImage

    begin, copy_part, copy_out, seal = ArenaSlot.begin, BoundImage.copy_out, ArenaSlot.copy_out, ArenaSlot.seal
    saves = 0

    def die_at(point: str) -> None:
        if (saves, point) == (fault.save, fault.point):
            if fault.when:
                wait_until(Path(fault.when).exists, f"the file {fault.when}")
            _kill_this_process()

    def begin_or_die(slot: Any, label: Any, number: int) -> None:
        nonlocal saves
        saves += 1
        die_at("begin")
        begin(slot, label, number)

    def copy_part_or_die(image: Any) -> None:
        copy_part(image)
        # The first of two files: the rank's file, with the content of a copy's file.
        die_at("copy")

    def copy_out_or_die(slot: Any) -> None:
        copy_out(slot)
        die_at("agree")

    def seal_or_die(slot: Any, **options: Any) -> None:
        die_at("seal")
        seal(slot, **options)
        if (saves, fault.point) == (fault.save, "call"):
            step, arena = slot.words().step, Arena(slot.path.parent)

            def are_sealed() -> bool:
                found = sealed_by_rank(arena)
                return all(step in [snapshot.step for snapshot in found.get(rank, [])] for rank in host_ranks)

            wait_until(are_sealed, "the seals of all")
            if fault.when:
                wake_writer(arena)
        die_at("call")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArenaSlot, "begin", begin_or_die)
        patch.setattr(BoundImage, "copy_out", copy_part_or_die)
        patch.setattr(ArenaSlot, "copy_out", copy_out_or_die)
        patch.setattr(ArenaSlot, "seal", seal_or_die)
        yield


@contextmanager
def faulty_writers(directory: Path) -> Iterator[None]:
    """Apply the faults in `directory` to the writers that this process starts in the block."""
    import pytest

    from megatrain.checkpoint import host_writer, snapshots
    from megatrain.programs.child_process import start_companion

    def start(command: Sequence[str], log: Path, name: str) -> subprocess.Popen[bytes]:
        return start_companion([command[0], "-m", "tests.helpers.faults", command[-1], str(directory)], log, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_writer, "start_companion", start)
        patch.setattr(snapshots, "_WAKE_AGAIN_S", _MISSED_AFTER_S)
        yield


# In tests


@dataclass(frozen=True, slots=True)
class WriterFaults:
    """The requested faults in a directory."""

    directory: Path

    @classmethod
    def order(cls, directory: Path, *faults: WriterFault) -> WriterFaults:
        directory.mkdir(parents=True)
        for number, fault in enumerate(faults):
            (directory / f"{number:02d}.json").write_text(json.dumps(asdict(fault)))
        return cls(directory)

    @property
    def num_reached(self) -> int:
        return len(list(self.directory.glob("*.reached")))

    def reached(self, number: int) -> Path:
        return self.directory / f"{number:02d}.reached"

    def tree(self, number: int) -> Path:
        """Return the copy of all checkpoints at a fault that was reached."""
        return self.directory / f"{number:02d}.tree"

    def release(self, number: int) -> None:
        """Release a writer that is held."""
        (self.directory / f"{number:02d}.go").touch()


# In writers


class _FaultyStorage:
    """A faulty writer's access to storage."""

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        self._root = ""
        self._num_times = 0
        self._path = min(directory.glob("[0-9][0-9].json"), default=None)
        self._fault: WriterFault | None = None
        if self._path is not None:
            self._fault = WriterFault(**json.loads(self._path.read_text()))
            # A later writer takes the next fault.
            self._path = self._path.rename(self._path.with_suffix(".taken"))

    def open(self, text: str) -> HookedLocation:
        from megatrain.checkpoint_format.url_location import open_location

        self._root = text
        return HookedLocation(open_location(text), self.before)

    def before(self, action: str, path: str) -> None:
        with self._lock:
            fault, place = self._fault, self._path
            if fault is None or place is None or action != fault.action or not re.search(f"{fault.path}$", path):
                return
            self._num_times += 1
            if self._num_times < fault.time:
                return
            self._fault = None
            _copy_as_it_is(self._root, place.with_suffix(".tree"))
            place.with_suffix(".reached").touch()
            if not fault.is_held:
                _kill_this_process()
            wait_until(place.with_suffix(".go").exists, f"{place.with_suffix('.go')}")


def _copy_as_it_is(root: str, target: Path) -> None:
    """Copy a tree that other hosts write into: a temporary file may have been renamed meanwhile."""
    for _ in range(_NUM_COPIES):
        try:
            shutil.copytree(root, target)
            return
        except shutil.Error:
            shutil.rmtree(target)
    raise AssertionError(f"{root} changes faster than it can be copied")


def _kill_this_process() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


def main(arguments: Sequence[str]) -> int:
    """Run as the writer of an arena, with the faults in a directory."""
    from megatrain.checkpoint import writer

    arena, directory = arguments
    make_writer: Callable[..., writer.CheckpointWriter] = writer.CheckpointWriter
    say_persist = writer.write_persist
    storage: list[_FaultyStorage] = []

    def make_faulty_writer(arena: Any, lock: Any) -> writer.CheckpointWriter:
        # Only now: the second of two writers ends before this point.
        storage.append(_FaultyStorage(Path(directory)))
        return make_writer(arena, lock, storage[0].open)

    def say_persist_or_die(*arguments: Any) -> bool:
        storage[0].before("persist", "word")
        return say_persist(*arguments)

    writer.CheckpointWriter = make_faulty_writer  # type: ignore[assignment, misc]
    writer.write_persist = say_persist_or_die
    return writer.main([arena])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
