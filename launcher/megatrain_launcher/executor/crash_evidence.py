"""What a broken round leaves behind: its black boxes, kept in the run directory; memory given back at the end.

A box is copied when its process is gone, by a thread of its own, so that the next round need not wait; then its memory
is freed. Boxes of processes that died unseen (their executor was killed too) are found by their names when an executor
begins and ends. Only boxes of this job's run and of dead processes of this machine are touched.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.contracts.black_box import BlackBoxReader
from megatrain.contracts.black_box_values import ClockBase
from megatrain.contracts.branches import MAIN_BRANCH
from megatrain.contracts.errors import DataError
from megatrain.contracts.host_records import HangEvidence
from megatrain.contracts.own_files import NotOwnError, check_own_directory, make_own_directory, open_own_file
from megatrain.contracts.record import encode
from megatrain.contracts.run_directory import (
    RunDirectory,
    black_box_path,
    kept_black_box,
    own_box_directory,
    own_box_paths,
    safe_name,
)
from megatrain_launcher.executor.evidence import is_running

_logger = logging.getLogger(__name__)
_MAX_ROUNDS_KEPT = 20
_MAX_BOXES_KEPT = 1280
"""Of the newest rounds so many are kept on disk, but fewer of a large job; two at least."""
_COPIED_BYTES = 1 << 20
_SAME_BOOT_NS = 2_000_000_000
"""The system's clock may have been set by less than this since."""


@dataclass(frozen=True, slots=True)
class BoxPlaces:
    """Where the ranks of a job leave their black boxes. `directory` is None where black boxes are off."""

    directory: Path | None
    job: str
    run: RunDirectory

    def paths(self, round_number: int, ranks: range) -> dict[int, Path]:
        """Return the file of each rank's black box in a round; none where they are off."""
        if self.directory is None:
            return {}
        return {
            rank: black_box_path(self.directory, self.job, self.run.key, MAIN_BRANCH, round_number, rank)
            for rank in ranks
        }

    def make(self) -> None:
        """Make this user's directory before any rank needs it. What keeps us from that, `trouble` says."""
        if self.directory is not None:
            with suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                make_own_directory(own_box_directory(self.directory))

    @property
    def trouble(self) -> str:
        """Why no black box can be trusted, empty where they can: then neither a hang nor a step is seen."""
        if self.directory is None:
            return ""
        try:
            check_own_directory(own_box_directory(self.directory))
        except FileNotFoundError:
            return ""  # it is made with the first black box
        except OSError as error:
            return (
                f"no black boxes: {error.filename} {error.strerror}; remove it, or name another "
                "telemetry.black_box_directory"
            )
        return ""

    def leftovers(self) -> list[Path]:
        """Return the black boxes of this run, and what was left of unfinished ones."""
        if self.directory is None:
            return []
        start = ".".join(("megatrain", safe_name(self.job), safe_name(self.run.key), safe_name(MAIN_BRANCH), ""))
        return [path for path in own_box_paths(self.directory) if path.name.lstrip(".").startswith(start)]


class CrashEvidence:
    """Keeps what broken rounds leave, from a thread of its own until `close`."""

    def __init__(self, places: BoxPlaces, num_ranks: int) -> None:
        """Keep the boxes of `places`; `num_ranks` is the job's size."""
        self.places = places
        self._max_rounds = max(2, min(_MAX_ROUNDS_KEPT, _MAX_BOXES_KEPT // max(1, num_ranks)))
        self._written: HangEvidence | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="crash evidence", daemon=True)
        self._thread.start()

    def directory(self, round_number: int) -> Path:
        return self.places.run.incidents / f"round-{round_number:06d}"

    def keep_positions(self, evidence: HangEvidence) -> None:
        """Have it written down where the ranks stand. What was kept of the round before gives way as `counts` says."""
        self._jobs.put(partial(self._write_positions, evidence))

    def keep_boxes(self, round_number: int, paths: Mapping[int, Path]) -> None:
        """Have the black boxes of a broken round copied and freed. Its processes must be gone."""
        for rank, path in paths.items():
            self._jobs.put(partial(self._keep, round_number, rank, path))
        self._jobs.put(self._thin_out)

    def sweep(self) -> None:
        """Keep and free the boxes of this run whose processes are dead, whoever left them."""
        for path in self.places.leftovers():
            try:
                with BlackBoxReader(path) as reader:
                    identity, clock = reader.identity, reader.clock
            except DataError:
                _remove_old(path)
                continue
            if _is_of_this_machine(clock) and not is_running(identity.pid):
                self.keep_boxes(identity.round, {identity.rank: path})

    def close(self) -> None:
        """Finish what was asked for."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write_positions(self, evidence: HangEvidence) -> None:
        if not counts(evidence, self._written):
            return
        self._written = evidence
        try:
            directory = self.directory(evidence.round)
            directory.mkdir(parents=True, exist_ok=True)
            place = directory / f"{safe_name(evidence.host)}.json"
            place.unlink(missing_ok=True)  # what is there may be a link to somewhere else
            place.write_bytes(encode(evidence) + b"\n")
        except OSError as error:
            _logger.warning("evidence of round %d is not kept: %s", evidence.round, error)

    def _keep(self, round_number: int, rank: int, path: Path) -> None:
        if not path.exists():
            return
        directory = self.directory(round_number)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            place = kept_black_box(directory, rank)
            place.unlink(missing_ok=True)
            with open(open_own_file(path, os.O_RDONLY), "rb") as box, place.open("xb") as kept:
                shutil.copyfileobj(box, kept, _COPIED_BYTES)
        except NotOwnError as error:
            _logger.warning("black box of rank %d in round %d is not kept: %s", rank, round_number, error)
            return
        except OSError as error:
            # the disk is full or away; shared memory must not fill up as well
            _logger.warning("black box of rank %d in round %d is not kept: %s", rank, round_number, error)
        with suppress(OSError):
            path.unlink()

    def _thin_out(self) -> None:
        with suppress(OSError):
            kept = sorted(self.places.run.incidents.glob("round-[0-9]*"))
            for directory in kept[: -self._max_rounds]:
                shutil.rmtree(directory, ignore_errors=True)


def counts(evidence: HangEvidence, before: HangEvidence | None) -> bool:
    """Say whether evidence takes the place of what is kept: what was taken before the round was halted counts.

    Of that the newest does. What was taken later shows ranks that fell with their peers, or were killed: it counts
    where there is nothing else, or where what there is is of a stall that passed, for ranks came to later steps since.
    """
    if before is None or before.round != evidence.round or not evidence.is_after_halt:
        return True
    if before.is_after_halt:
        return False
    stood_at = {one.rank: one.step for one in before.ranks}
    return any(one.step > stood_at.get(one.rank, one.step) for one in evidence.ranks)


def _is_of_this_machine(clock: ClockBase) -> bool:
    """Say whether a box was written here since the last boot: no two machines' monotonic clocks began together.

    A directory may be one that several machines see; only of our own processes we know that they are dead.
    """
    began_ns = time.time_ns() - time.monotonic_ns()
    return abs(clock.unix_ns - clock.monotonic_ns - began_ns) < _SAME_BOOT_NS


def _remove_old(path: Path) -> None:
    """Remove a file that is no black box, unless it may be one that is just being made."""
    with suppress(OSError):
        if not path.name.startswith("."):
            path.unlink()
