"""Ranks: stable over rounds, initially by topology; every rank once."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.rounds import Round
from megatrain_launcher.driver.ranks import choose, parts_of


def record(name: str, switch: str = "") -> HostRecord:
    labels = {"switch": switch} if switch else {}
    return HostRecord(name, f"{name}-1", 1, name, 1, 2, 2, "", "", "", 0.0, is_fit=True, labels=labels)


def records(*names: str) -> dict[str, HostRecord]:
    return {name: record(*name.split("@")) for name in names}


def round_of(*hosts: HostRecord) -> Round:
    return Round(1, 2 * len(hosts), parts_of(hosts, 2), "", 1, "", "", 0.0)


def names(chosen: tuple[HostRecord, ...]) -> list[str]:
    return [one.host for one in chosen]


def test_first_placement_follows_switches_then_names() -> None:
    found = choose(records("h10@s1", "h2@s2", "h3@s1", "h1@s10"), None, 4)
    assert names(found) == ["h3", "h10", "h2", "h1"]
    assert [part.first_rank for part in parts_of(found, 2)] == [0, 2, 4, 6]


def test_spare_takes_the_place_of_the_lost_host() -> None:
    before = round_of(record("a"), record("b"), record("c"))
    assert names(choose(records("spare", "c", "a"), before, 3)) == ["a", "spare", "c"]


def test_members_come_before_spares_of_the_same_switch() -> None:
    before = round_of(record("a", "s1"), record("b", "s1"), record("c", "s1"))
    assert names(choose(records("x@s2", "y@s1", "a@s1", "b@s1"), before, 3)) == ["a", "b", "y"]
    assert names(choose(records("x@s2", "y@s1", "a@s1", "b@s1", "c@s1"), before, 3)) == ["a", "b", "c"]


def test_shrinking_and_growing_move_the_fewest_hosts() -> None:
    before = round_of(record("a"), record("b"), record("c"), record("d"))
    assert names(choose(records("a", "c", "d"), before, 3)) == ["a", "d", "c"]
    assert names(choose(records("a", "b", "c", "d", "e"), round_of(record("b"), record("a")), 4)) == [
        "b",
        "a",
        "c",
        "d",
    ]


@settings(max_examples=60, derandomize=True)
@given(st.sets(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), unique=True), st.data())
def test_every_rank_once_and_members_keep_their_place(
    present: set[int], before: list[int], data: st.DataObject
) -> None:
    available = {f"h{number}": record(f"h{number}", f"s{number % 3}") for number in present}
    previous = round_of(*(record(f"h{number}") for number in before)) if before else None
    count = data.draw(st.integers(1, len(present)))
    chosen = choose(available, previous, count)
    assert len(set(names(chosen))) == count
    if previous is not None:
        members = [host.host for host in previous.hosts if host.host in available][:count]
        kept = [
            host for host in members if (slot := [p.host for p in previous.hosts].index(host)) < count and slot >= 0
        ]
        assert all(names(chosen)[[p.host for p in previous.hosts].index(host)] == host for host in kept)
