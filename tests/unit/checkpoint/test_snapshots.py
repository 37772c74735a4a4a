"""When the writer is called: by the first rank of a host for each snapshot, by any rank that misses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.checkpoint import snapshots
from megatrain.checkpoint.arena_slots import SnapshotLabel
from megatrain.checkpoint.snapshots import Snapshots
from megatrain.contracts.arena_layout import Persist, SlotState
from megatrain.contracts.errors import SaveError
from tests.helpers.arena_snapshots import ROUND, make_job, put_slot


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
        self.state, self.step = SlotState.WRITING, label.step

    def copy_out(self) -> None:
        pass

    def seal(self) -> None:
        self.state, self.persist = SlotState.SEALED, Persist.WANTED

    def is_free(self) -> bool:
        return self.state != SlotState.SEALED or self.persist != Persist.WANTED

    def words(self) -> Any:
        return self


def make_snapshots(slots: list[_Slot], calls: list[str], local_rank: int = 0) -> Snapshots:
    host: Any = SimpleNamespace(minimum=list)
    members: list[Any] = list(slots)
    return Snapshots(members, 1000, 0, local_rank, host, lambda: calls.append("call"), lambda: 0, lambda: None)


def label(step: int) -> SnapshotLabel:
    return SnapshotLabel(step, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(("local_rank", "expected"), [(0, ["call"]), (1, [])])
def test_a_snapshot_calls_the_writer_once_a_host(local_rank: int, expected: list[str]) -> None:
    calls: list[str] = []
    found = make_snapshots([_Slot()], calls, local_rank)
    found.take(label(1), timeout_s=1.0)
    found.tend()
    assert calls == expected
    assert found.pending() == 1


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_writer_that_is_missed_is_called_by_every_rank_whose_snapshot_waits(
    local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    slot = _Slot()
    found = make_snapshots([slot], calls, local_rank)
    found.take(label(1), timeout_s=1.0)
    calls.clear()
    monkeypatch.setattr(snapshots, "_CALL_AGAIN_S", -1.0)
    found.tend()
    assert calls == ["call"]
    slot.persist = Persist.DONE
    found.tend()
    assert calls == ["call"]


def test_who_waits_for_room_calls_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = _Slot()

    class Writer(list[str]):
        def append(self, call: str) -> None:
            super().append(call)
            slot.persist = Persist.DONE

    calls = Writer()
    found = make_snapshots([slot], calls, local_rank=1)
    found.take(label(1), timeout_s=1.0)
    assert calls == []
    monkeypatch.setattr(snapshots, "_CALL_AGAIN_S", -1.0)
    assert found.take(label(2), timeout_s=60.0).step == 2
    assert calls == ["call"]
    assert not found.has_failed(2)


def test_storage_that_never_takes_a_snapshot_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_CALL_AGAIN_S", 1000.0)
    found = make_snapshots([_Slot()], [])
    found.take(label(1), timeout_s=1.0)
    assert not found.wait(timeout_s=0.01)
    with pytest.raises(SaveError, match=r"gone/slot: its snapshot is not in storage after 0\.01 s, so"):
        found.take(label(2), timeout_s=0.01)


def test_a_snapshot_that_was_given_up_is_not_waited_for() -> None:
    """Storage wanted it, and then the job went on from something else."""
    found = make_snapshots([_Slot(state=SlotState.EMPTY, persist=Persist.WANTED, step=7)], [])
    assert found.pending() is None
    assert found.wait(timeout_s=0.0)


def test_a_snapshot_of_which_storage_wants_another_rank_is_left_in_its_slot(tmp_path: Path) -> None:
    """The writer died between two ranks: the next one needs all of it."""
    job = make_job(tmp_path)
    paths = [put_slot(job.arena, rank, step=10, snapshot=4, persist=word)
             for rank, word in enumerate((Persist.DONE, Persist.WANTED))]  # fmt: skip
    mine = _Slot(paths[0], SlotState.SEALED, Persist.DONE, step=10, round=ROUND, snapshot=4)
    found = make_snapshots([mine], [])
    with pytest.raises(SaveError, match="there is no room"):
        found.take(label(20), timeout_s=0.01)
    assert mine.step == 10
    put_slot(job.arena, 1, step=5, snapshot=2)
    found.take(label(20), timeout_s=0.01)
    assert mine.step == 20
