"""Two rounds of one job that store the same step in one storage: an older round, which is delayed, and a newer one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.arena.directory import Arena
from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import sealed_slots
from megatrain.checkpoint.persist import Persistence, WriteResult
from megatrain.checkpoint.persist_policy import next_due
from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.location import Location
from tests.helpers.arena_snapshots import ROUND, described_by, host_plan, make_arena, put_slot
from tests.helpers.hooked_location import READS, Hook, HookedLocation

STEP = 10


@dataclass(frozen=True)
class RoundOnAHost:
    """A round of one host with two ranks, whose snapshot of STEP waits for storage."""

    arena: Arena
    plan: HostPlan

    def persist(self, checkpoints: Location) -> WriteResult:
        """Store the snapshot. Raises: CheckpointError."""
        due = next_due(sealed_slots(self.arena), {self.plan.round: self.plan})
        assert due is not None
        return Persistence(self.arena, due, checkpoints, lambda: "").run()


def make_round(
    directory: Path, round_number: int, checkpoints: str, *, step: int = STEP, claim: str = ""
) -> RoundOnAHost:
    plan = host_plan(checkpoints, keep_last=1, round=round_number, claim=claim)
    directory.mkdir(exist_ok=True)
    arena = make_arena(directory / f"round-{round_number}", plan, described_by(plan.ranks, round_number))
    for rank in plan.ranks:
        put_slot(arena, rank, step=step, snapshot=round_number, round_number=round_number)
    return RoundOnAHost(arena, plan)


def two_rounds(directory: Path, checkpoints: str) -> tuple[RoundOnAHost, RoundOnAHost]:
    return make_round(directory, ROUND, checkpoints), make_round(directory, ROUND + 1, checkpoints)


class HeldUp:
    """A storage that waits before its change `number` until `meanwhile` has ended."""

    def __init__(self, number: int, meanwhile: Callable[[], None]) -> None:
        self.point = ""
        self._left = number
        self._meanwhile = meanwhile
        self._lock = threading.Lock()

    def __call__(self, action: str, path: str) -> None:
        if action in READS:
            return
        with self._lock:  # Files are written in parallel.
            if self._left == 0:
                self.point = f"{action} {path.rpartition('/')[2]}"
                self._meanwhile()
            self._left -= 1

    def over(self, checkpoints: Location) -> Location:
        hook: Hook = self
        return HookedLocation(checkpoints, hook)


def newest(checkpoints: Location) -> int | None:
    """Return the step that a job would go on from, whose checkpoint is whole."""
    found = candidates(checkpoints)
    if found:
        assert verify_checkpoint(found[0].location) == []
    return found[0].step if found else None
