"""Orders as a host receives them: which round it may start, when it must stop, and what it says it has in hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.contracts.diag_records import DiagSettings
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import encode
from megatrain.contracts.rounds import Halt, HostCommand, JobEnd, Round, RoundHost
from megatrain.coordination.watch import Change, ChangeKind, Changes, Snapshot
from megatrain.coordination.wire import KeyRange, KeyValue
from megatrain_launcher.executor.orders import OrderBook
from tests.helpers.waiting import wait_until

KEYS = JobKeys("j")
ALL = KeyRange.prefix(KEYS.prefix)


def a_round(number: int, *hosts: str, session: str = "1") -> Round:
    parts = tuple(RoundHost(host, session, "127.0.0.1", 2 * place, 2) for place, host in enumerate(hosts))
    return Round(number, 2 * len(parts), parts, "127.0.0.1", 1, "a test", "d", 0.0)


def a_halt(number: int, *, is_saving: bool = False) -> Halt:
    return Halt(number, f"halt {number}", is_saving, 0.0)


def item(key: str, value: Any) -> KeyValue:
    return KeyValue(key.encode(), value if isinstance(value, bytes) else encode(value), 1, 1, 1, 0)


@pytest.fixture
def book() -> OrderBook:
    return OrderBook(KEYS, "a", "1")


def put(book: OrderBook, key: str, value: Any) -> None:
    book.take(Changes(1, (Change(ChangeKind.PUT, item(key, value)),)), ALL)


def write_round(book: OrderBook, number: int, *hosts: str, session: str = "1") -> None:
    put(book, KEYS.round(number), a_round(number, *hosts, session=session))


def write_halt(book: OrderBook, number: int, *, is_saving: bool = False) -> None:
    put(book, KEYS.halt(number), a_halt(number, is_saving=is_saving))


def test_a_round_that_names_this_life_of_the_host_is_handed_out(book: OrderBook) -> None:
    write_round(book, 1, "b", "a")
    assignment = book.next_assignment(0)
    assert assignment is not None
    assert (assignment.round.number, assignment.part.first_rank) == (1, 2)
    assert (book.view().taken, book.must_stop(1)) == (1, "")


@pytest.mark.parametrize(
    "prepare",
    [
        lambda book: write_round(book, 2, "b"),
        lambda book: write_round(book, 2, "a", session="an older one"),
        lambda book: (write_round(book, 2, "a"), write_halt(book, 2)),
        lambda book: (write_round(book, 2, "a"), write_round(book, 3, "b")),
        lambda book: write_round(book, 1, "a"),  # it was handed out before
    ],
    ids=["not named", "an old session", "halted", "not the newest", "not new"],
)
def test_other_rounds_are_waited_out(book: OrderBook, prepare: Callable[[OrderBook], object]) -> None:
    prepare(book)
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(book.next_assignment(1)))
    waiter.start()
    write_halt(book, 4)
    waiter.join(0.05)
    assert waiter.is_alive()
    write_round(book, 5, "a")
    waiter.join(10)
    (assignment,) = found
    assert assignment is not None
    assert assignment.round.number == 5  # type: ignore[attr-defined]


def test_workers_must_stop_for_a_halt_a_newer_round_or_the_end(book: OrderBook) -> None:
    write_round(book, 1, "a")
    assert (book.must_stop(1), book.is_saving(1)) == ("", False)
    write_halt(book, 1, is_saving=True)
    assert (book.must_stop(1), book.is_saving(1)) == ("halt 1", True)
    write_round(book, 2, "b")
    assert book.must_stop(1) == "halt 1"
    write_round(book, 4, "b")
    assert book.must_stop(3) == "round 4 has begun"
    assert not book.is_saving(3)
    put(book, KEYS.end, JobEnd(0, "done", 0.0))
    assert book.must_stop(4) == "the job is over: done"
    assert not book.is_saving(1)
    assert book.next_assignment(0) is None


def test_a_host_can_stop_its_workers_for_reasons_of_its_own(book: OrderBook) -> None:
    write_round(book, 1, "a")
    book.stop_round(1, "fenced")
    assert (book.must_stop(1), book.is_saving(1)) == ("fenced", False)
    write_round(book, 2, "a")
    assert book.must_stop(2) == ""
    book.save_and_stop("SIGTERM")
    assert (book.must_stop(2), book.is_saving(2)) == ("SIGTERM", True)
    book.leave("killed")
    assert (book.must_stop(2), book.is_saving(2)) == ("killed", False)


def test_workers_that_save_for_a_reason_of_their_host_are_killed_when_the_driver_waits_for_no_save(
    book: OrderBook,
) -> None:
    write_round(book, 1, "a")
    book.stop_round(1, "no lease", is_saving=True)
    assert book.is_saving(1)
    write_halt(book, 1)
    assert not book.is_saving(1)


@pytest.mark.parametrize("is_own", [False, True])
def test_workers_of_a_host_that_slept_save_nothing_once_a_newer_round_has_begun(
    book: OrderBook, *, is_own: bool
) -> None:
    write_round(book, 1, "a")
    if is_own:
        book.stop_round(1, "no lease", is_saving=True)
    write_halt(book, 1, is_saving=True)
    assert book.is_saving(1)
    write_round(book, 2, "b")
    assert not book.is_saving(1)


def test_a_snapshot_replaces_what_its_range_held_and_nothing_else(book: OrderBook) -> None:
    write_round(book, 1, "a")
    write_halt(book, 1)
    put(book, KEYS.end, JobEnd(0, "done", 0.0))
    rounds = KeyRange.prefix(KEYS.directory("rounds"))
    book.take(Snapshot(9, (item(KEYS.round(2), a_round(2, "a")),), "compacted"), rounds)
    view = book.view()
    assert view.newest is not None
    assert (view.newest.number, view.newest_halt, view.end is None) == (2, 1, False)
    book.take(Snapshot(9, (), "compacted"), ALL)
    assert book.view().newest is None
    assert book.must_stop(1) == ""  # an etcd that lost everything orders nothing


def test_what_cannot_be_read_is_passed_over(book: OrderBook) -> None:
    put(book, KEYS.round(1), b"{")
    put(book, KEYS.round(2), b'{"schema_version": 99}')
    write_round(book, 3, "a")
    assert book.next_assignment(0) is not None


@pytest.mark.parametrize("name", ["3", "003", "0000000003"])
def test_a_number_that_nobody_writes_so_is_no_number(book: OrderBook, name: str) -> None:
    put(book, f"{KEYS.directory('rounds')}{name}", a_round(3, "a"))
    assert book.view().newest is None


def test_commands_to_others_are_not_ours(book: OrderBook) -> None:
    for number, hosts in ((1, ()), (2, ("b",)), (3, ("a", "b"))):
        put(book, KEYS.command(number), HostCommand(number, "check", hosts))
    assert [command.number for command in book.commands_after(0)] == [1, 3]
    assert [command.number for command in book.commands_after(1)] == [3]


def test_a_new_life_begins_only_when_no_worker_of_the_old_one_is_left(book: OrderBook) -> None:
    write_round(book, 1, "a", "b")
    assert not book.begin_life("2")
    book.next_assignment(0)
    write_round(book, 2, "b")
    assert not book.begin_life("2")  # the workers of round 1 are still being stopped
    waiter = threading.Thread(target=lambda: book.next_assignment(1))
    waiter.start()
    wait_until(lambda: book.view().taken == 0, "the agent to come back", 10)
    assert book.begin_life("2")
    assert not book.begin_life("3")  # one life is enough
    write_round(book, 3, "a", "b", session="1")
    assert book.view().taken == 0
    write_round(book, 4, "a", "b", session="2")
    waiter.join(10)
    assert book.view().taken == 4


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.integers(1, 6), st.sampled_from([("a",), ("b",), ("a", "b")])),
        st.tuples(st.just("halt"), st.integers(1, 6), st.just(())),
        st.tuples(st.just("take"), st.integers(0, 6), st.just(())),
    ),
    max_size=12,
)


@given(ACTIONS)
def test_no_order_of_events_hands_out_a_round_that_may_not_run(actions: list[tuple[str, int, tuple[str, ...]]]) -> None:
    book = OrderBook(KEYS, "a", "1")
    rounds: dict[int, tuple[str, ...]] = {}
    halts: set[int] = set()
    for kind, number, hosts in actions:
        if kind == "round" and number not in rounds:
            rounds[number] = hosts
            write_round(book, number, *hosts)
        elif kind == "halt":
            halts.add(number)
            write_halt(book, number)
        elif kind == "take":
            newest = max(rounds, default=0)
            is_offered = newest > number and newest not in halts and "a" in rounds[newest]
            if is_offered:
                assignment = book.next_assignment(number)
                assert assignment is not None
                assert assignment.round.number == newest
                assert book.must_stop(newest) == ""
        for known in rounds:
            assert bool(book.must_stop(known)) == (known in halts or known < max(rounds))


def test_what_ranks_shall_record_is_heard_and_taken_back(book: OrderBook) -> None:
    assert book.diag_settings() is None
    put(book, KEYS.diag_settings, DiagSettings(sample_period=3))
    assert book.diag_settings() == DiagSettings(sample_period=3)
    put(book, KEYS.diag_settings, b"{")
    assert book.diag_settings() == DiagSettings(sample_period=3), "what cannot be read changes nothing"
    book.take(Changes(2, (Change(ChangeKind.DELETE, item(KEYS.diag_settings, b"")),)), ALL)
    assert book.diag_settings() is None
    put(book, KEYS.diag_settings, DiagSettings(is_on=False))
    book.take(Snapshot(9, (), "compacted"), KeyRange.prefix(KEYS.directory("rounds")))
    assert book.diag_settings() is not None, "a snapshot of something else"
    book.take(Snapshot(9, (), "compacted"), ALL)
    assert book.diag_settings() is None
