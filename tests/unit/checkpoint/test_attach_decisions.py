"""The decisions of rank 0 when workers enter their hosts' arenas: which snapshot to resume, and which ranks lack it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.host_reports import (
    HeldSnapshot,
    HostReport,
    memory_point,
    missing_ranks,
    newest_plan_rank,
    next_snapshot_number,
)


def held(owner: int, step: int, digest: str = "", *, is_pending: bool = False, is_copy: bool = False) -> HeldSnapshot:
    return HeldSnapshot(owner, SealedSnapshot(step, 0, step // 10), digest or f"plan-{owner}", is_pending, is_copy)


def report(rank: int, host: str, *snapshots: HeldSnapshot) -> HostReport:
    return HostReport(host, f"plan-{rank}", 0, snapshots)


def test_host_report_json_round_trip() -> None:
    sent = replace(
        report(0, "a", held(0, 40), held(1, 50, is_pending=True), held(2, 50, is_copy=True)), contents_bytes=7
    )
    assert HostReport.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_newest_snapshot_of_present_plans_is_resumed() -> None:
    reports = [
        report(0, "a", held(0, 40), held(1, 40), held(0, 50), held(1, 50)),
        report(1, "a"),
        report(2, "b", held(2, 40), held(3, 40), held(2, 50)),
        report(3, "b"),
    ]
    point = memory_point(reports)
    assert point is not None
    assert point.snapshot.step == 40
    assert point.holder_of == (0, 1, 2, 3)


def test_snapshot_of_another_layout_is_not_resumed() -> None:
    reports = [report(0, "a", held(0, 40, "another"), held(1, 40)), report(1, "a")]
    assert memory_point(reports) is None
    # nor those of ranks that no longer exist
    assert memory_point([report(0, "a", held(0, 40), held(5, 40))]) is not None


def test_next_snapshot_number_follows_the_highest() -> None:
    assert next_snapshot_number([report(0, "a")], None, 2) == 0
    reports = [report(0, "a", held(0, 40), held(1, 50)), report(1, "b", held(2, 30))]
    assert next_snapshot_number(reports, None, 2) == 6


@pytest.mark.parametrize(("num_slots", "number"), [(1, 6), (2, 7)])
def test_next_snapshot_does_not_overwrite_the_resumed_one(num_slots: int, number: int) -> None:
    """Only some ranks had sealed step 50 when the job died, so it resumes from step 40, which is in slot 0."""
    reports = [report(0, "a", held(0, 40), held(1, 40), held(0, 50)), report(1, "a")]
    memory = memory_point(reports)
    assert memory is not None
    assert memory.snapshot.snapshot == 4
    assert next_snapshot_number(reports, memory, num_slots) == number
    both = [report(0, "a", held(0, 40), held(1, 40), held(0, 50), held(1, 50)), report(1, "a")]
    assert next_snapshot_number(both, memory_point(both), num_slots) == 6


def test_peer_copy_replaces_the_snapshot_of_a_lost_host() -> None:
    reports = [
        report(0, "a", held(0, 40), held(1, 40), held(0, 50), held(1, 50), held(2, 50, is_copy=True)),
        report(1, "a"),
        report(2, "new"),
    ]
    point = memory_point(reports)
    assert point is not None
    assert (point.snapshot.step, point.holder_of) == (50, (0, 1, 0))
    assert missing_ranks(reports, point.snapshot) == (2,)
    assert memory_point(reports, may_fetch=False) is None


def test_copy_of_another_plan_replaces_no_snapshot() -> None:
    reports = [report(0, "a", held(0, 50), held(1, 50, "another", is_copy=True)), report(1, "new")]
    assert memory_point(reports) is None


def test_snapshot_in_a_foreign_slot_is_fetched_from_the_own_host() -> None:
    # Ranks were reassigned: rank 1 is now on the host with its copy, and rank 0 on the former host of rank 1.
    reports = [
        report(0, "a", held(0, 50, is_copy=True), held(1, 50)),
        report(1, "b", held(1, 50, is_copy=True), held(0, 50)),
    ]
    point = memory_point(reports)
    assert point is not None
    assert missing_ranks(reports, point.snapshot) == (0, 1)
    assert memory_point(reports, may_fetch=False) is None


def test_older_snapshot_in_place_is_resumed_without_fetching() -> None:
    reports = [
        report(0, "a", held(0, 40), held(0, 50), held(1, 50, is_copy=True)),
        report(1, "b", held(1, 40)),
    ]
    newest, in_place = memory_point(reports), memory_point(reports, may_fetch=False)
    assert newest is not None
    assert in_place is not None
    assert (newest.snapshot.step, in_place.snapshot.step) == (50, 40)
    assert missing_ranks(reports, newest.snapshot) == (1,)
    assert missing_ranks(reports, in_place.snapshot) == ()


def test_slots_that_give_way_hold_nothing() -> None:
    gives_way = HeldSnapshot(0, SealedSnapshot(40, 0, 4), "", is_pending=True)
    assert memory_point([report(0, "a", gives_way)]) is None


def test_first_rank_with_the_newest_plan_describes_it() -> None:
    new_host = replace(report(0, "new"), last_round=-1)
    reports = [new_host, report(1, "a"), replace(report(2, "b"), last_round=3), replace(report(3, "c"), last_round=3)]
    assert newest_plan_rank(reports) == 2
    # Without any snapshot, the data and configuration are unknown.
    assert memory_point([replace(report(0, "a", held(0, 40)), last_round=-1)]) is None
