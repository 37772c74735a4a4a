"""When a checkpoint is saved, and when it is written to storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.directory import SlotFile
from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import SealedSlot
from megatrain.arena.slot_layout import Persist, SealedSnapshot, SlotHeader, SlotState, SlotWords
from megatrain.checkpoint.persist_policy import (
    is_abandoned,
    is_superseded,
    is_taken_over,
    next_due,
    to_give_up,
)
from megatrain.checkpoint.save_policy import SaveInterval, free_bytes, policy_notes
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.config.checkpoint import CheckpointConfig
from tests.helpers.arena_snapshots import host_plan

GB = 10**9


class SaveClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def interval(clock: SaveClock, **settings: Any) -> SaveInterval:
    return SaveInterval(CheckpointConfig(**settings), clock)


def test_next_checkpoint_is_due_one_interval_after_the_last() -> None:
    clock = SaveClock()
    found = interval(clock)
    clock.now += 599.0
    assert not found.is_over(is_storing=False)
    clock.now += 1.0
    assert found.is_over(is_storing=False)
    found.saved(0.5)
    assert not found.is_over(is_storing=False)
    clock.now += 600.0
    assert found.is_over(is_storing=False)


def test_no_more_than_a_share_of_the_time_goes_into_checkpoints() -> None:
    clock = SaveClock()
    found = interval(clock)
    found.saved(30.0)
    assert found.length_s == pytest.approx(1500.0)  # 30 s are 2 % of it
    clock.now += 1499.0
    assert not found.is_over(is_storing=False)
    clock.now += 2.0
    assert found.is_over(is_storing=False)
    found.saved(1.0)  # it is quick again
    assert found.length_s == 600.0


def test_no_checkpoint_is_due_while_the_last_is_written() -> None:
    clock = SaveClock()
    found = interval(clock)
    clock.now += 5000.0
    assert not found.is_over(is_storing=True)
    assert found.is_over(is_storing=False)


def test_no_checkpoint_is_due_by_time_without_a_time_interval() -> None:
    for settings in ({"interval": 100}, {"interval_s": 0.0}, {"interval": 7, "interval_s": 0.0}):
        clock = SaveClock()
        found = interval(clock, **settings)
        clock.now += 1e6
        assert not found.is_over(is_storing=False), settings


def test_number_of_kept_checkpoints_follows_from_the_interval() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 3),
        ({"interval": 100}, 0),
        ({"interval": 100, "keep_last": 2}, 2),
        ({"keep_last": 0}, 0),
        ({"keep_last": 5}, 5),
    ]
    for settings, num_kept in cases:
        assert CheckpointConfig(**settings).num_kept == num_kept, settings


BY_TIME = (
    "a checkpoint is taken every 10 min of training (checkpoint.interval_s), less often if they would take more "
    "than 2% of it; the last step is saved"
)
NEVER = (
    "WARNING: no checkpoint is taken before the end; the last step is saved: checkpoint.interval=0 and "
    "checkpoint.interval_s=0; a failure loses all training progress that is not still in memory"
)
TWO_KINDS = (
    "the newest 1 and those of every 100th step are kept (checkpoint.keep_last), 7 GB each: up to 14 GB for the newest "
    "in /runs, where 10 GB are free"
)
SMALL_DISK = (
    "WARNING: /runs may become too small for its checkpoints: they need 14 GB, and 10 GB are free; keep fewer "
    "(checkpoint.keep_last), or name a larger directory (checkpoint.directory)"
)
THREE = "the newest 3 are kept (checkpoint.keep_last), 7 GB each: up to 28 GB in /runs, where 100 GB are free"
ALL = "all of them are kept (checkpoint.keep_last), 7 GB each in /runs"
EVERY_10 = "a checkpoint is taken every 10 steps (checkpoint.interval)"


def test_log_lines_about_checkpoints_at_the_start() -> None:
    cases: list[tuple[dict[str, Any], int | None, list[str]]] = [
        ({}, 100 * GB, [BY_TIME, THREE]),
        ({"interval": 10, "save_at_end": False}, None, [EVERY_10, ALL]),
        (
            {"interval": 10, "keep_last": 1, "keep_every": 100},
            10 * GB,
            [f"{EVERY_10}; the last step is saved", TWO_KINDS, SMALL_DISK],
        ),
        ({"interval_s": 0.0}, 100 * GB, [NEVER]),
    ]
    for settings, free, notes in cases:
        assert policy_notes(CheckpointConfig(**settings), "/runs", 7 * GB, free) == notes


def test_free_space_is_that_of_the_disk_and_of_no_url(tmp_path: Path) -> None:
    found = free_bytes(str(tmp_path / "not" / "there" / "yet"))
    assert found is not None
    assert found > 0
    assert free_bytes("s3://bucket/run") is None


PLAN = host_plan("/checkpoints", ranks=(0, 1))
MANY = replace(PLAN, num_hosts=2)


def slot(rank: int, step: int, snapshot: int, persist: Persist = Persist.PENDING, round_number: int = 2) -> SealedSlot:
    words = SlotWords(
        state=SlotState.SEALED, step=step, snapshot=snapshot, round=round_number, consumed_samples=0,
        consumed_tokens=0, num_updates=0, num_skipped=0, sealed_unix_ns=0, persist=persist,
    )  # fmt: skip
    file = SlotFile(Path(f"rank-{rank}.slot-{snapshot % 2}"), rank, snapshot % 2, is_copy=False)
    sealed = SealedSnapshot(step, round_number, snapshot)
    return SealedSlot(file, SlotHeader(rank, file.slot, 2, 64, bytes(32)), words, sealed)


def both(step: int, snapshot: int, persist: Persist = Persist.PENDING, round_number: int = 2) -> list[SealedSlot]:
    return [slot(rank, step, snapshot, persist, round_number) for rank in (1, 0)]


def plans(*plans: HostPlan) -> dict[int, HostPlan]:
    return {plan.round: plan for plan in plans}


def due_step(slots: list[SealedSlot], known: dict[int, HostPlan]) -> int | None:
    due = next_due(slots, known)
    if due is None:
        return None
    assert [one.rank for one in due.slots] == list(due.plan.ranks)
    assert {one.snapshot for one in due.slots} == {due.snapshot}
    assert due.plan.round == due.snapshot.round
    return due.snapshot.step


def reasons(slots: list[SealedSlot], known: dict[int, HostPlan], *, has_workers: bool = True) -> dict[int, str]:
    found = to_give_up(slots, known, has_workers=has_workers)
    for one in found:
        assert {member.snapshot for member in one.slots} == {one.snapshot}
    return {one.snapshot.step: one.reason for one in found}


DUE: list[tuple[list[SealedSlot], int | None]] = [
    ([], None),
    (both(10, 0), 10),
    # The oldest first, by their number: after a restart steps may be lower.
    (both(20, 1) + both(10, 0), 10),
    (both(10, 5) + both(20, 4), 20),
    (both(20, 1) + both(10, 0, Persist.DONE), 20),
    (both(10, 0, Persist.DONE) + both(20, 1, Persist.FAILED), None),
    (both(10, 0, Persist.NONE), None),
    # One rank has not sealed, or is one snapshot ahead.
    ([slot(0, 10, 0)], None),
    ([slot(0, 10, 0), slot(1, 20, 1)], None),
    ([slot(0, 10, 0), slot(1, 10, 2)], None),
    ([slot(0, 10, 0), slot(1, 10, 0, round_number=3)], None),
    # Its writer was killed while it marked both as done, or both as failed.
    ([slot(0, 10, 0, Persist.DONE), slot(1, 10, 0)], 10),
    ([slot(0, 10, 0), slot(1, 10, 0, Persist.FAILED)], 10),
    # another host's rank, from the time when it was here
    ([*both(10, 0), slot(7, 10, 0)], 10),
]


def test_due_snapshot_is_the_oldest_that_all_ranks_sealed() -> None:
    for slots, step in DUE:
        assert due_step(slots, plans(PLAN)) == step, slots
        assert due_step(slots, {}) is None


def test_pending_snapshot_of_an_older_round_is_due() -> None:
    newer = replace(MANY, round=3, ranks=(0, 1, 2))
    assert due_step(both(10, 0), plans(MANY, newer)) == 10
    assert reasons(both(10, 0), plans(MANY, newer)) == {}


def test_lone_host_stores_without_the_plan_of_an_older_round() -> None:
    assert due_step(both(10, 0), plans(replace(PLAN, round=5))) == 10
    assert reasons(both(10, 0), plans(replace(PLAN, round=5))) == {}
    other_ranks = plans(replace(PLAN, round=5, ranks=(0, 1, 2)))
    assert due_step(both(10, 0), other_ranks) is None
    assert reasons(both(10, 0), other_ranks) == {10: "not sealed by rank 2, which cannot seal it any more"}


def test_several_hosts_skip_a_snapshot_without_agreement() -> None:
    newer = replace(MANY, round=3)
    assert due_step(both(10, 0), plans(newer)) is None
    assert reasons(both(10, 0), plans(newer)) == {10: "host.json is of round 3, and the plan of round 2 is unknown"}


def test_snapshot_waits_for_its_round_in_host_json() -> None:
    slots = both(10, 0, round_number=3)
    for known in (plans(MANY), plans(PLAN)):
        assert due_step(slots, known) is None
        assert reasons(slots, known) == {}
        assert reasons(slots, known, has_workers=False) == {}


def test_a_newer_round_supersedes_an_older_one_of_several_hosts() -> None:
    slots = both(10, 0) + both(20, 1, round_number=3)
    known = plans(MANY, replace(MANY, round=3))
    assert is_superseded(SealedSnapshot(10, 2, 0), MANY, slots)
    assert not is_superseded(SealedSnapshot(20, 3, 1), MANY, slots)
    assert due_step(slots, known) == 20
    assert reasons(slots, known) == {10: "round 3 needs a checkpoint, and hosts of round 2 may be gone"}
    # A single host waits for no other host.
    assert due_step(slots, plans(PLAN, replace(PLAN, round=3))) == 10
    assert not is_superseded(SealedSnapshot(10, 2, 0), PLAN, slots)
    # A newer round that wants nothing yet removes nothing.
    assert not is_superseded(SealedSnapshot(10, 2, 0), MANY, both(10, 0) + both(20, 1, Persist.DONE, 3))


def test_unsealed_slot_is_awaited_only_within_the_limit() -> None:
    slots = [slot(0, 10, 0)]
    assert reasons(slots, plans(PLAN)) == {}
    gone = "not sealed by rank 1, which cannot seal it any more"
    assert reasons(slots, plans(PLAN), has_workers=False) == {10: gone}
    assert reasons(slots, plans(PLAN, replace(PLAN, round=3))) == {10: gone}
    three = replace(PLAN, ranks=(0, 1, 2))
    assert reasons(slots, plans(three), has_workers=False) == {10: gone.replace("rank 1", "ranks 1-2")}
    assert reasons(slots, {}, has_workers=False) == {}
    assert reasons([slot(0, 10, 0, Persist.DONE)], plans(PLAN), has_workers=False) == {}


def test_a_newer_round_takes_a_snapshot_over_at_its_step() -> None:
    for step, round_number, expected in [(10, 3, True), (10, 2, False), (10, 1, False), (20, 3, False)]:
        slots = [slot(0, 10, 0), slot(1, step, 1, Persist.DONE, round_number)]
        assert is_taken_over(SealedSnapshot(10, 2, 0), slots) == expected, (step, round_number)


def test_incomplete_checkpoint_of_an_old_writer_is_abandoned() -> None:
    for mark, expected in [
        (None, True),
        (WritingMark(round=2, job="demo", started_unix_s=1000.0), True),
        (WritingMark(round=1, job="demo", started_unix_s=1000.0), False),
        (WritingMark(round=1, job="demo", started_unix_s=959.0), True),
        (WritingMark(round=3, job="demo", started_unix_s=0.0), False),
    ]:
        assert is_abandoned(mark, replace(PLAN, commit_timeout_s=20.0), 1000.0) == expected, mark
