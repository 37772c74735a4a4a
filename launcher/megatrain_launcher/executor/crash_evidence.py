"""Keeps the evidence of broken rounds in the run directory: black boxes and positions of ranks.

A separate thread copies a box once its process is gone, and then removes the original from shared memory; the next
round does not wait for this. An executor also copies the boxes that a killed earlier executor left on the same machine:
it searches for them when it starts and when it ends. Only boxes of this job's run and of dead processes are touched.
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

from megatrain.checkpoint_format.branches import MAIN_BRANCH
from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.black_box.values import ClockBase
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, make_own_directory, open_own_file
from megatrain.contracts.records.host_records import HangEvidence
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import (
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
"""The most black boxes to keep on disk; so a large job keeps fewer rounds, but at least two."""
_COPIED_BYTES = 1 << 20
_SAME_BOOT_NS = 2_000_000_000
"""A box counts as one of this boot if the system's clock was changed by less than this since the box was created."""


@dataclass(frozen=True, slots=True)
class BoxPaths:
    """The paths of the black boxes of a job's ranks. `directory` is None if black boxes are off."""

    directory: Path | None
    job: str
    run: RunDirectory

    def paths(self, round_number: int, ranks: range) -> dict[int, Path]:
        """Return the file of each rank's black box in a round; none if black boxes are off."""
        if self.directory is None:
            return {}
        return {
            rank: black_box_path(self.directory, self.job, self.run.key, MAIN_BRANCH, round_number, rank)
            for rank in ranks
        }

    def make(self) -> None:
        """Create this user's directory before any rank needs it. `problem` reports a failure."""
        if self.directory is not None:
            with suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                make_own_directory(own_box_directory(self.directory))

    @property
    def problem(self) -> str:
        """The reason why black boxes cannot be used; empty if they can. Without them, no step or hang is detected."""
        if self.directory is None:
            return ""
        try:
            check_own_directory(own_box_directory(self.directory))
        except FileNotFoundError:
            return ""  # the directory is made with the first black box
        except OSError as error:
            return (
                f"no black boxes: {error.filename} {error.strerror}; remove it, or name another "
                "telemetry.black_box_directory"
            )
        return ""

    def leftovers(self) -> list[Path]:
        """Return the files of this run's black boxes, including incomplete ones."""
        if self.directory is None:
            return []
        start = ".".join(("megatrain", safe_name(self.job), safe_name(self.run.key), safe_name(MAIN_BRANCH), ""))
        return [path for path in own_box_paths(self.directory) if path.name.lstrip(".").startswith(start)]


class CrashEvidence:
    """Keeps the evidence of broken rounds, in a separate thread, until `close`."""

    def __init__(self, box_paths: BoxPaths, num_ranks: int) -> None:
        """Keep the boxes at `box_paths`; `num_ranks` is the job's size."""
        self.box_paths = box_paths
        self._max_rounds = max(2, min(_MAX_ROUNDS_KEPT, _MAX_BOXES_KEPT // max(1, num_ranks)))
        self._written: HangEvidence | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="crash evidence", daemon=True)
        self._thread.start()

    def directory(self, round_number: int) -> Path:
        return self.box_paths.run.incidents / f"round-{round_number:06d}"

    def keep_positions(self, evidence: HangEvidence) -> None:
        """Queue the ranks' positions to be written, unless earlier positions take precedence (`counts`)."""
        self._jobs.put(partial(self._write_positions, evidence))

    def keep_boxes(self, round_number: int, paths: Mapping[int, Path]) -> None:
        """Queue the black boxes of a broken round to be copied and removed. Its processes must be gone."""
        for rank, path in paths.items():
            self._jobs.put(partial(self._keep, round_number, rank, path))
        self._jobs.put(self._thin_out)

    def sweep(self) -> None:
        """Queue the boxes of dead processes of this run to be copied and removed; other executors' boxes too."""
        for path in self.box_paths.leftovers():
            try:
                with BlackBoxReader(path) as reader:
                    identity, clock = reader.identity, reader.clock
            except DataError:
                _remove_old(path)
                continue
            if _is_of_this_machine(clock) and not is_running(identity.pid):
                self.keep_boxes(identity.round, {identity.rank: path})

    def close(self) -> None:
        """Finish the queued work."""
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
            kept_path = directory / f"{safe_name(evidence.host)}.json"
            kept_path.unlink(missing_ok=True)  # do not write through a link
            kept_path.write_bytes(encode(evidence) + b"\n")
        except OSError as error:
            _logger.warning("evidence of round %d is not kept: %s", evidence.round, error)

    def _keep(self, round_number: int, rank: int, path: Path) -> None:
        if not path.exists():
            return
        directory = self.directory(round_number)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            kept_path = kept_black_box(directory, rank)
            kept_path.unlink(missing_ok=True)
            with open(open_own_file(path, os.O_RDONLY), "rb") as box, kept_path.open("xb") as kept:
                shutil.copyfileobj(box, kept, _COPIED_BYTES)
        except NotOwnError as error:
            _logger.warning("black box of rank %d in round %d is not kept: %s", rank, round_number, error)
            return
        except OSError as error:
            # the disk is full or unavailable; shared memory must not fill up too
            _logger.warning("black box of rank %d in round %d is not kept: %s", rank, round_number, error)
        with suppress(OSError):
            path.unlink()

    def _thin_out(self) -> None:
        with suppress(OSError):
            kept = sorted(self.box_paths.run.incidents.glob("round-[0-9]*"))
            for directory in kept[: -self._max_rounds]:
                shutil.rmtree(directory, ignore_errors=True)


def counts(evidence: HangEvidence, before: HangEvidence | None) -> bool:
    """Return whether new evidence replaces the kept evidence of the round: the newest from before the halt is kept.

    Evidence from after the halt shows ranks that failed with their peers or were killed. It is used only if there is no
    evidence from before the halt, or if ranks have reached later steps since, so that the kept evidence shows an
    earlier stall.
    """
    if before is None or before.round != evidence.round or not evidence.is_after_halt:
        return True
    if before.is_after_halt:
        return False
    stood_at = {rank_evidence.rank: rank_evidence.step for rank_evidence in before.ranks}
    return any(
        rank_evidence.step > stood_at.get(rank_evidence.rank, rank_evidence.step) for rank_evidence in evidence.ranks
    )


def _is_of_this_machine(clock: ClockBase) -> bool:
    """Return whether a box was written on this machine since its last boot, by the origin of the monotonic clock.

    Several machines may share the directory, but the processes of other machines cannot be checked here.
    """
    began_ns = time.time_ns() - time.monotonic_ns()
    return abs(clock.unix_ns - clock.monotonic_ns - began_ns) < _SAME_BOOT_NS


def _remove_old(path: Path) -> None:
    """Remove a file that is not a black box, unless it may be one that is still being created (hidden)."""
    with suppress(OSError):
        if not path.name.startswith("."):
            path.unlink()
