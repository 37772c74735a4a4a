"""Calls of the writer: by the first rank of a host for each snapshot, or by any rank that finds it missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.arena.slot_layout import Persist, SlotState, SlotWords
from megatrain.checkpoint import snapshots
from megatrain.checkpoint.arena_slots import SnapshotLabel
from megatrain.checkpoint.snapshots import Snapshots
from megatrain.contracts.errors import SaveError
from tests.helpers.arena_snapshots import ROUND, make_job, put_slot
from tests.helpers.waiting import DEADLINE_S


@dataclass
class _Slot:
    """A slot without memory."""

    path: Path = Path("gone/slot")
    state: SlotState = SlotState.EMPTY
    persist: Persist = Persist.NONE
    step: int = -1
    round: int = 0
    snapshot: int = -1

    def begin(self, label: SnapshotLabel, number: int) -> None:
        self.state, self.step, self.snapshot = SlotState.WRITING, label.step, number

    def copy_out(self) -> None:
        pass

    def seal(self) -> None:
        self.state, self.persist = SlotState.SEALED, Persist.PENDING

    def is_free(self) -> bool:
        return self.state != SlotState.SEALED or self.persist != Persist.PENDING

    def persist_of(self, number: int) -> Persist | None:
        return self.persist if self.state == SlotState.SEALED and self.snapshot == number else None

    def give_up(self) -> None:
        self.persist = Persist.FAILED

    def words(self) -> SlotWords:
        return SlotWords(self.state, self.step, self.snapshot, self.round, 0, 0, 0, 0, 0, self.persist)


def make_snapshots(slots: list[_Slot], calls: list[str], local_rank: int = 0) -> Snapshots:
    host: Any = SimpleNamespace(minimum=list, agree=lambda rank, problem: problem)
    members: list[Any] = list(slots)
    return Snapshots(members, 0, local_rank, local_rank, host, lambda: calls.append("call"), lambda: 0, lambda: None)


def label(step: int) -> SnapshotLabel:
    return SnapshotLabel(step, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(("local_rank", "expected"), [(0, ["call"]), (1, [])])
def test_a_snapshot_calls_the_writer_once_a_host(local_rank: int, expected: list[str]) -> None:
    calls: list[str] = []
    found = make_snapshots([_Slot()], calls, local_rank)
    found.take(label(1), timeout_s=DEADLINE_S)
    found.ensure_writer_runs()
    assert calls == expected
    assert found.pending() == 1


@pytest.mark.parametrize("local_rank", [0, 1])
def test_every_rank_with_a_waiting_snapshot_wakes_the_writer(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    slot = _Slot()
    found = make_snapshots([slot], calls, local_rank)
    found.take(label(1), timeout_s=DEADLINE_S)
    calls.clear()
    monkeypatch.setattr(snapshots, "_WAKE_AGAIN_S", -1.0)
    found.ensure_writer_runs()
    assert calls == ["call"]
    slot.persist = Persist.DONE
    found.ensure_writer_runs()
    assert calls == ["call"]


def test_waiting_for_a_free_slot_calls_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = _Slot()

    class Writer(list[str]):
        def append(self, call: str) -> None:
            super().append(call)
            slot.persist = Persist.DONE

    calls = Writer()
    found = make_snapshots([slot], calls, local_rank=1)
    found.take(label(1), timeout_s=DEADLINE_S)
    assert calls == []
    monkeypatch.setattr(snapshots, "_WAKE_AGAIN_S", -1.0)
    assert found.take(label(2), timeout_s=DEADLINE_S).step == 2
    assert calls == ["call"]
    assert not found.has_failed(2)


def test_storage_that_never_takes_a_snapshot_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_WAKE_AGAIN_S", 1000.0)
    found = make_snapshots([_Slot()], [])
    found.take(label(1), timeout_s=DEADLINE_S)
    assert not found.wait(timeout_s=0.01)
    with pytest.raises(SaveError, match=r"gone/slot: its snapshot is not in storage after 0\.01 s, so"):
        found.take(label(2), timeout_s=0.01)


def test_a_slot_that_is_freed_at_the_deadline_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_WAKE_AGAIN_S", 1000.0)
    slot = _Slot()
    found = make_snapshots([slot], [])
    found.take(label(1), timeout_s=DEADLINE_S)

    def minimum(values: list[int]) -> list[int]:
        if len(values) == 3 and not values[1]:  # the agreement after the deadline
            return [*values[:2], 0]
        return values

    found._cpu_groups = SimpleNamespace(minimum=minimum, agree=lambda rank, problem: problem)  # type: ignore[assignment]
    assert found.take(label(2), timeout_s=0.01).step == 2


def test_a_rank_that_waits_for_another_ranks_storage_shows_life() -> None:
    waits = [[0, 1, 1], [0, 1, 1], [1, 1, 1]]
    found = make_snapshots([_Slot()], [])
    found._cpu_groups = SimpleNamespace(minimum=lambda values: waits.pop(0) if waits else values)  # type: ignore[assignment]
    signs: list[str] = []
    found._show_liveness = lambda: signs.append("alive")
    assert found.take(label(1), timeout_s=DEADLINE_S).step == 1
    assert signs == ["alive", "alive"]


@pytest.mark.parametrize(("is_stored", "others_are_usable", "expected"), [(True, 1, 1), (True, 0, 2), (False, 1, 2)])
def test_snapshot_with_free_slots_costs_one_agreement(is_stored: bool, others_are_usable: int, expected: int) -> None:
    agreements: list[list[int]] = []

    def minimum(values: list[int]) -> list[int]:
        agreements.append(values)
        is_of_first_snapshot = len(agreements) == 2
        return [values[0], min(values[1], others_are_usable), *values[2:]] if is_of_first_snapshot else values

    slots = [_Slot(), _Slot() if is_stored else _Slot(state=SlotState.SEALED, persist=Persist.PENDING)]
    found = make_snapshots(slots, [])
    found._cpu_groups = SimpleNamespace(minimum=minimum)  # type: ignore[assignment]
    found.take(label(1), timeout_s=DEADLINE_S)
    slots[1].persist = Persist.DONE
    agreements_before = len(agreements)
    found.take(label(2), timeout_s=DEADLINE_S)

    assert agreements_before == 2, "nothing is known before the first snapshot"
    assert len(agreements) - agreements_before == expected


def test_rank_that_waits_for_storage_is_named_by_the_others() -> None:
    found = make_snapshots([_Slot()], [])
    found._cpu_groups = SimpleNamespace(
        minimum=lambda values: [0] * len(values), agree=lambda rank, problem: "slot-2: full"
    )  # type: ignore[assignment]
    with pytest.raises(SaveError, match="another rank waits for storage: slot-2: full"):
        found.take(label(2), timeout_s=0.0)


def test_snapshot_that_failed_on_another_host_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer's mark is lost if storage accepts no files: only the ranks can pass it on."""
    monkeypatch.setattr(snapshots, "_SHARE_AGAIN_S", 0.0)
    slots = [_Slot(), _Slot()]
    newest_and_older_elsewhere = [1, 1]

    def minimum(values: list[int]) -> list[int]:
        others = [1, 1, *newest_and_older_elsewhere] if len(values) == 4 else values
        return [min(pair) for pair in zip(values, others, strict=True)]

    found = make_snapshots(slots, [])
    found._cpu_groups = SimpleNamespace(minimum=minimum)  # type: ignore[assignment]
    found.take(label(10), timeout_s=DEADLINE_S)
    found.take(label(20), timeout_s=DEADLINE_S)
    newest_and_older_elsewhere[1] = 0
    assert found.take(label(30), timeout_s=DEADLINE_S).step == 30
    assert [(slot.step, slot.persist) for slot in slots] == [(30, Persist.PENDING), (20, Persist.PENDING)]


def test_a_snapshot_that_was_given_up_is_not_waited_for() -> None:
    """It waited to be written, and then the job resumed from another snapshot."""
    found = make_snapshots([_Slot(state=SlotState.EMPTY, persist=Persist.PENDING, step=7)], [])
    assert found.pending() is None
    assert found.wait(timeout_s=0.0)


def test_snapshot_that_another_rank_still_writes_keeps_its_slot(tmp_path: Path) -> None:
    """The writer died between two ranks: the next writer needs all of it."""
    job = make_job(tmp_path)
    paths = [put_slot(job.arena, rank, step=10, snapshot=4, persist=word)
             for rank, word in enumerate((Persist.DONE, Persist.PENDING))]  # fmt: skip
    mine = _Slot(paths[0], SlotState.SEALED, Persist.DONE, step=10, round=ROUND, snapshot=4)
    found = make_snapshots([mine], [])
    with pytest.raises(SaveError, match="there is no free slot"):
        found.take(label(20), timeout_s=0.01)
    assert mine.step == 10
    put_slot(job.arena, 1, step=5, snapshot=2)
    found.take(label(20), timeout_s=0.01)
    assert mine.step == 20
