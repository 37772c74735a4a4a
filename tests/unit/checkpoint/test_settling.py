"""What a restart waits for: snapshots in memory that storage wants, can get, and that nobody could go back to."""

from __future__ import annotations

import json

from megatrain.checkpoint.attach import Held, HostReport, to_settle
from megatrain.contracts.arena import SealedSnapshot

OLD, NEW = SealedSnapshot(40, 0, 4), SealedSnapshot(50, 0, 5)


def held(owner: int, snapshot: SealedSnapshot, *, is_wanted: bool = True, is_copy: bool = False) -> Held:
    return Held(owner, snapshot, f"plan-{owner}", is_wanted, is_copy)


def report(host: str, ranks: tuple[int, ...], num_hosts: int, *snapshots: Held) -> HostReport:
    return HostReport(host, "plan", 0, snapshots, last_ranks=ranks, last_hosts=num_hosts)


def other(host: str) -> HostReport:
    """Return what a rank says that is not the first of its host."""
    return HostReport(host, "plan", -1, ())


def test_a_snapshot_that_all_ranks_of_all_hosts_have() -> None:
    hosts = [
        report("a", (0, 1), 2, held(0, OLD), held(1, OLD), held(0, NEW), held(1, NEW)),
        other("a"),
        report("b", (2, 3), 2, held(2, OLD), held(3, OLD, is_wanted=False), held(2, NEW)),
        other("b"),
    ]
    assert to_settle(hosts) == {OLD}
    assert to_settle([HostReport.from_json(json.loads(json.dumps(one.to_json()))) for one in hosts]) == {OLD}


def test_what_nobody_wants() -> None:
    assert to_settle([report("a", (0,), 1, held(0, OLD, is_wanted=False))]) == set()


def test_a_rank_that_never_sealed_it() -> None:
    assert to_settle([report("a", (0, 1), 1, held(0, OLD), held(1, OLD, is_copy=True)), other("a")]) == set()


def test_a_host_that_is_lost() -> None:
    assert to_settle([report("a", (0,), 2, held(0, OLD)), report("new", (), 0)]) == set()
    assert to_settle([report("a", (0,), 1, held(0, OLD)), report("new", (), 0)]) == {OLD}


def test_a_host_without_a_plan() -> None:
    assert to_settle([report("a", (), 0, held(0, OLD))]) == set()
