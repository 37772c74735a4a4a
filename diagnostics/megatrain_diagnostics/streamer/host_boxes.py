"""The black boxes of this host's ranks: found by their names, followed until their ranks are gone.

A machine may be several hosts: a box's header names its owner. An unreadable box is reported once and skipped; the
others continue.
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
    """Follows all boxes of a run and host."""

    def __init__(
        self, directory: Path, prefix: str, host: str, clock: HostClock, position_of: Callable[[str], int]
    ) -> None:
        """`position_of`: RankTail.name -> record up to which an earlier life streamed the box; 0: none."""
        self._directory, self._prefix, self._host, self._clock = directory, prefix, host, clock
        self._position_of = position_of
        self._known: dict[tuple[int, str], Identity | None] = {}
        """(inode, name) -> identity of a box that is followed, finished or of another host; None: an unusable box.

        An inode alone does not identify a box: a box of a new round may reuse that of the round before.
        """
        self._tails: list[RankTail] = []
        self.num_lost = 0
        """Records of removed boxes that were overwritten before they were read."""
        self.num_nonsense = 0

    @property
    def tails(self) -> tuple[RankTail, ...]:
        return tuple(self._tails)

    def newest(self, latest: int) -> tuple[RankTail, ...]:
        """Return the ranks of the newest round up to `latest`, the driver's newest round; 0: not known.

        A box may claim any round: a box of a round that never began would hide the ranks that train.
        """
        rounds = [tail.identity.round for tail in self._tails if not latest or tail.identity.round <= latest]
        return tuple(tail for tail in self._tails if tail.identity.round == max(rounds, default=0))

    def find(self) -> None:
        """Find the present boxes, and check which ranks are gone."""
        for tail in self._tails:
            tail.check_process()
        found = {}
        for path in self._paths():
            key = (box_inode(path), path.name)
            if key[0]:
                found[key] = self._known[key] if key in self._known else self._open(path)
        self._known = found

    def poll(self) -> Tables:
        """Return the new rows of all boxes; stop following those of ended ranks."""
        found: Tables = []
        for tail in self.tails:
            try:
                is_over = not tail.is_running  # checked before this poll, which then reads all that it wrote
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
        """Follow a box, unless it belongs to another host, or was set aside; return its identity."""
        try:
            tail = RankTail(path, self._clock)
        except DataError as error:
            _logger.warning("a black box is not streamed: %s", error)
            return None
        if tail.identity.host != self._host or tail.identity in self._known.values():
            tail.close()
            return tail.identity
        if not _is_named_for(path, tail.identity):
            # a copy never changes: it would make a live rank look silent
            _logger.warning(
                "a black box is not streamed: %s: its name does not belong to its rank, so it is a copy", path
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
        self.num_nonsense += tail.num_nonsense
        self._tails.remove(tail)
        tail.close()


def _is_named_for(path: Path, identity: Identity) -> bool:
    """Return whether a box has the name that its writer gave it, or the one under which it was set aside."""
    at = (safe_name(identity.branch), f"{identity.round:06d}", f"rank-{identity.rank:05d}")
    own = path.with_name(f"{'.'.join(at)}.blackbox")
    return path.name.endswith((f".{own.name}", f".{previous_black_box(own).name}"))
