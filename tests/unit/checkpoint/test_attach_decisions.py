"""What rank 0 decides when workers enter their hosts' arenas: which snapshot to go on from, and if there is room."""

from __future__ import annotations

import json

from megatrain.checkpoint.attach import Held, HostReport, memory_point, next_snapshot_number, room_problem
from megatrain.contracts.arena import SealedSnapshot

GB = 10**9


def held(owner: int, step: int, digest: str = "", *, is_wanted: bool = False) -> Held:
    return Held(owner, SealedSnapshot(step, 0, step // 10), digest or f"plan-{owner}", is_wanted)


def report(rank: int, host: str, *snapshots: Held) -> HostReport:
    return HostReport(host, f"plan-{rank}", 0, snapshots)


def test_a_report_survives_json() -> None:
    sent = report(0, "a", held(0, 40), held(1, 50, is_wanted=True))
    assert HostReport.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_the_newest_snapshot_of_the_present_plans_is_gone_on_from() -> None:
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


def test_snapshots_of_another_layout_are_none_to_go_on_from() -> None:
    reports = [report(0, "a", held(0, 40, "another"), held(1, 40)), report(1, "a")]
    assert memory_point(reports) is None
    # nor those of ranks that are not there any more
    assert memory_point([report(0, "a", held(0, 40), held(5, 40))]) is not None


def test_numbers_of_snapshots_go_on() -> None:
    assert next_snapshot_number([report(0, "a")]) == 0
    assert next_snapshot_number([report(0, "a", held(0, 40), held(1, 50)), report(1, "b", held(2, 30))]) == 6


def test_room_is_counted_by_host() -> None:
    hosts = ["a", "a", "b"]
    assert room_problem(hosts, [GB, GB, 3 * GB], [3 * GB, 2 * GB, 4 * GB], 2, "/dev/shm") is None
    assert room_problem(hosts, [0, 0, 0], [0, 0, 0], 2, "/dev/shm") is None
    problem = room_problem(hosts, [GB, GB, 3 * GB], [3 * GB, 3 * GB, 2 * GB], 2, "/dev/shm")
    assert problem is not None
    assert problem.startswith(
        "checkpoint.slots=2: the 1 ranks of host b need 3 GB more for snapshots in /dev/shm, and 0.0671 GB are left "
        "free, but there are 2 GB; use checkpoint.slots=1"
    )


def test_the_spare_room_counts() -> None:
    assert room_problem(["a"], [GB], [GB + (64 << 20)], 1, "/dev/shm") is None
    assert room_problem(["a"], [GB], [GB + (64 << 20) - 1], 1, "/dev/shm") is not None
