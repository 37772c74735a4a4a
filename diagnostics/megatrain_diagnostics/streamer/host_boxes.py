"""The black boxes of this host's ranks: found by their file names, and read until their processes have exited.

Several hosts of a job may run on one machine, so the host is read from a box's header. An unreadable box is logged once
and skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.errors import DataError
from megatrain.run_files.run_directory import own_box_paths, previous_black_box, safe_name
from megatrain_diagnostics.streamer.rank_tail import HostClock, RankTail, Tables, box_inode

_logger = logging.getLogger(__name__)


class HostBoxes:
    """Reads all boxes of a run and host as they grow."""

    def __init__(
        self, directory: Path, prefix: str, host: str, clock: HostClock, position_of: Callable[[str], int]
    ) -> None:
        """`position_of`: RankTail.name -> last record that an earlier streamer process has sent; 0: none."""
        self._directory, self._prefix, self._host, self._clock = directory, prefix, host, clock
        self._position_of = position_of
        self._known: dict[tuple[int, str], Identity | None] = {}
        """(inode, name) -> identity of a box that is being read, finished, or of another host; None: unusable.

        An inode alone does not identify a box: a box of a new round may reuse the inode of an earlier one.
        """
        self._tails: list[RankTail] = []
        self.num_lost = 0
        """Records of removed boxes that were overwritten before they were read."""
        self.num_invalid = 0

    @property
    def tails(self) -> tuple[RankTail, ...]:
        return tuple(self._tails)

    def newest(self, latest: int) -> tuple[RankTail, ...]:
        """Return the ranks of the newest round up to `latest`, the newest round of the driver; 0: not known.

        Later rounds are ignored: a box with a wrong round number in its header would hide the ranks that are training.
        """
        rounds = [tail.identity.round for tail in self._tails if not latest or tail.identity.round <= latest]
        return tuple(tail for tail in self._tails if tail.identity.round == max(rounds, default=0))

    def find(self) -> None:
        """Open new boxes, and check which processes have exited."""
        for tail in self._tails:
            tail.check_process()
        found = {}
        for path in self._paths():
            key = (box_inode(path), path.name)
            if key[0]:
                found[key] = self._known[key] if key in self._known else self._open(path)
        self._known = found

    def poll(self) -> Tables:
        """Return the new rows of all boxes; close the boxes of ranks that have ended."""
        found: Tables = []
        for tail in self.tails:
            try:
                is_over = not tail.is_running  # checked first, so that the poll reads everything the rank has written
                found += tail.poll()
                if is_over:
                    found += [] if tail.has_ended_well else tail.evidence()
                    self._release(tail)
            except DataError as error:
                _logger.warning("rank %d is no longer streamed: %s", tail.identity.rank, error)
                self._release(tail)
        return found

    def evidence(self, tails: tuple[RankTail, ...]) -> Tables:
        """Return the newest records of these ranks, and their open spans."""
        found: Tables = []
        for tail in tails:
            try:
                found += tail.evidence()
            except DataError as error:
                _logger.warning("the newest records of rank %d cannot be read: %s", tail.identity.rank, error)
        return found

    def close(self) -> None:
        for tail in self.tails:
            self._release(tail)

    def _paths(self) -> list[Path]:
        found = own_box_paths(self._directory)
        return [path for path in found if path.name.startswith(self._prefix) and path.name.endswith(".blackbox")]

    def _open(self, path: Path) -> Identity | None:
        """Start to read a box, unless it is of another host or known under another name; return its identity."""
        try:
            tail = RankTail(path, self._clock)
        except DataError as error:
            _logger.warning("a black box is not streamed: %s", error)
            return None
        if tail.identity.host != self._host or tail.identity in self._known.values():
            tail.close()
            return tail.identity
        if not _is_named_for(path, tail.identity):
            # a copy never changes, so a live rank would look silent
            _logger.warning(
                "a black box is not streamed: %s: its name differs from the rank in its header, so it is a copy", path
            )
            tail.close()
            return None
        if (after := self._position_of(tail.name)) > 0:
            tail.skip_to(after)
        self._tails.append(tail)
        _logger.info("rank %d of round %d: following %s", tail.identity.rank, tail.identity.round, path)
        return tail.identity

    def _release(self, tail: RankTail) -> None:
        self.num_lost += tail.num_lost
        self.num_invalid += tail.num_invalid
        self._tails.remove(tail)
        tail.close()


def _is_named_for(path: Path, identity: Identity) -> bool:
    """Return whether a box has the name of its rank, or that name after a later process renamed it."""
    at = (safe_name(identity.branch), f"{identity.round:06d}", f"rank-{identity.rank:05d}")
    own = path.with_name(f"{'.'.join(at)}.blackbox")
    return path.name.endswith((f".{own.name}", f".{previous_black_box(own).name}"))
