"""Orders as a host receives them: which round it may start, when it must stop, and which round it reports as
started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Halt, HostCommand, JobEnd, Round, RoundHost
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes, Snapshot
from megatrain_job.coordination.wire import KeyRange, KeyValue
from megatrain_launcher.executor.order_state import OrderState
from tests.helpers.waiting import DEADLINE_S, wait_until

KEYS = JobKeys("j")
ALL = KeyRange.prefix(KEYS.prefix)


def a_round(number: int, *hosts: str, session: str = "1") -> Round:
    parts = tuple(RoundHost(host, session, "127.0.0.1", 2 * place, 2) for place, host in enumerate(hosts))
    return Round(number, 2 * len(parts), parts, "127.0.0.1", 1, "a test", "d", 0.0)


def a_halt(number: int, *, is_saving: bool = False) -> Halt:
    return Halt(number, f"halt {number}", is_saving, 0.0)


def item(key: str, value: Any) -> KeyValue:
    return KeyValue(key.encode(), value if isinstance(value, bytes) else encode(value), 1, 1, 0)


@pytest.fixture
def orders() -> OrderState:
    return OrderState(KEYS, "a", "1")


def put(orders: OrderState, key: str, value: Any) -> None:
    orders.take(Changes(1, (Change(ChangeKind.PUT, item(key, value)),)), ALL)


def write_round(orders: OrderState, number: int, *hosts: str, session: str = "1") -> None:
    put(orders, KEYS.round(number), a_round(number, *hosts, session=session))


def write_halt(orders: OrderState, number: int, *, is_saving: bool = False) -> None:
    put(orders, KEYS.halt(number), a_halt(number, is_saving=is_saving))


def test_round_with_the_session_of_the_host_is_assigned(orders: OrderState) -> None:
    write_round(orders, 1, "b", "a")
    assignment = orders.next_assignment(0)
    assert assignment is not None
    assert (assignment.round.number, assignment.part.first_rank) == (1, 2)
    assert (orders.view().taken_round, orders.stop_reason(1)) == (1, "")


def test_rounds_that_a_host_may_not_start_are_waited_out() -> None:
    prepared: dict[str, Callable[[OrderState], object]] = {
        "not named": lambda orders: write_round(orders, 2, "b"),
        "an old session": lambda orders: write_round(orders, 2, "a", session="an older one"),
        "halted": lambda orders: (write_round(orders, 2, "a"), write_halt(orders, 2)),
        "not the newest": lambda orders: (write_round(orders, 2, "a"), write_round(orders, 3, "b")),
        "handed out before": lambda orders: write_round(orders, 1, "a"),
    }
    hosts = {name: OrderState(KEYS, "a", "1") for name in prepared}
    with ThreadPoolExecutor(len(hosts)) as threads:
        waiting = {}
        for name, prepare in prepared.items():
            prepare(hosts[name])
            waiting[name] = threads.submit(hosts[name].next_assignment, 1)
            write_halt(hosts[name], 4)
        done, _ = wait(waiting.values(), 0.05)
        early = [name for name, one in waiting.items() if one in done]
        for orders in hosts.values():
            write_round(orders, 5, "a")
        found = {name: one.result(DEADLINE_S) for name, one in waiting.items()}
    assert early == []
    assert {name: one and one.round.number for name, one in found.items()} == dict.fromkeys(hosts, 5)


def test_workers_must_stop_for_a_halt_a_newer_round_or_the_end(orders: OrderState) -> None:
    write_round(orders, 1, "a")
    assert (orders.stop_reason(1), orders.is_saving(1)) == ("", False)
    write_halt(orders, 1, is_saving=True)
    assert (orders.stop_reason(1), orders.is_saving(1)) == ("halt 1", True)
    assert [orders.is_halted(number) for number in (1, 2)] == [True, False]
    write_round(orders, 2, "b")
    assert orders.stop_reason(1) == "halt 1"
    write_round(orders, 4, "b")
    assert orders.stop_reason(3) == "round 4 has begun"
    assert not orders.is_saving(3)
    put(orders, KEYS.end, JobEnd(0, "done", 0.0))
    assert orders.stop_reason(4) == "the job is over: done"
    assert not orders.is_saving(1)
    assert orders.next_assignment(0) is None


def test_host_stops_its_workers_for_local_reasons(orders: OrderState) -> None:
    write_round(orders, 1, "a")
    orders.stop_round(1, "fenced")
    assert (orders.stop_reason(1), orders.is_saving(1)) == ("fenced", False)
    write_round(orders, 2, "a")
    assert orders.stop_reason(2) == ""
    orders.save_and_stop("SIGTERM")
    assert (orders.stop_reason(2), orders.is_saving(2)) == ("SIGTERM", True)
    orders.leave("killed")
    assert (orders.stop_reason(2), orders.is_saving(2)) == ("killed", False)


def test_unwanted_save_of_workers_is_ended(orders: OrderState) -> None:
    write_round(orders, 1, "a")
    orders.stop_round(1, "no lease", is_saving=True)
    assert orders.is_saving(1)
    write_halt(orders, 1)
    assert not orders.is_saving(1)


def test_workers_of_an_older_round_do_not_save() -> None:
    for is_stopped_by_host in (False, True):
        orders = OrderState(KEYS, "a", "1")
        write_round(orders, 1, "a")
        if is_stopped_by_host:
            orders.stop_round(1, "no lease", is_saving=True)
        write_halt(orders, 1, is_saving=True)
        assert orders.is_saving(1), is_stopped_by_host
        write_round(orders, 2, "b")
        assert not orders.is_saving(1), is_stopped_by_host


def test_snapshot_replaces_exactly_its_range(orders: OrderState) -> None:
    write_round(orders, 1, "a")
    write_halt(orders, 1)
    put(orders, KEYS.end, JobEnd(0, "done", 0.0))
    rounds = KeyRange.prefix(KEYS.directory("rounds"))
    orders.take(Snapshot(9, (item(KEYS.round(2), a_round(2, "a")),), "compacted"), rounds)
    view = orders.view()
    assert view.newest is not None
    assert (view.newest.number, view.newest_halt, view.end is None) == (2, 1, False)
    orders.take(Snapshot(9, (), "compacted"), ALL)
    assert orders.view().newest is None
    assert orders.stop_reason(1) == ""  # An etcd without data orders nothing.


def test_unreadable_order_is_ignored(orders: OrderState) -> None:
    put(orders, KEYS.round(1), b"{")
    put(orders, KEYS.round(2), b'{"schema_version": 99}')
    write_round(orders, 3, "a")
    assert orders.next_assignment(0) is not None


def test_commands_to_other_hosts_are_left_out(orders: OrderState) -> None:
    for number, hosts in ((1, ()), (2, ("b",)), (3, ("a", "b"))):
        put(orders, KEYS.command(number), HostCommand(number, "check", hosts))
    assert [command.number for command in orders.commands_after(0)] == [1, 3]
    assert [command.number for command in orders.commands_after(1)] == [3]


def test_new_session_waits_for_the_end_of_old_workers(orders: OrderState) -> None:
    write_round(orders, 1, "a", "b")
    assert not orders.begin_session("2")
    orders.next_assignment(0)
    write_round(orders, 2, "b")
    assert not orders.begin_session("2")  # The workers of round 1 are still being stopped.
    waiter = threading.Thread(target=lambda: orders.next_assignment(1))
    waiter.start()
    wait_until(lambda: orders.view().taken_round == 0, "the agent to come back")
    assert orders.begin_session("2")
    assert not orders.begin_session("3")  # One session is enough.
    write_round(orders, 3, "a", "b", session="1")
    assert orders.view().taken_round == 0
    write_round(orders, 4, "a", "b", session="2")
    waiter.join(DEADLINE_S)
    assert orders.view().taken_round == 4


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.integers(1, 6), st.sampled_from([("a",), ("b",), ("a", "b")])),
        st.tuples(st.just("halt"), st.integers(1, 6), st.just(())),
        st.tuples(st.just("take"), st.integers(0, 6), st.just(())),
    ),
    max_size=12,
)


@settings(max_examples=50)
@given(ACTIONS)
def test_no_order_of_events_gives_a_round_that_may_not_run(actions: list[tuple[str, int, tuple[str, ...]]]) -> None:
    orders = OrderState(KEYS, "a", "1")
    rounds: dict[int, tuple[str, ...]] = {}
    halts: set[int] = set()
    for kind, number, hosts in actions:
        if kind == "round" and number not in rounds:
            rounds[number] = hosts
            write_round(orders, number, *hosts)
        elif kind == "halt":
            halts.add(number)
            write_halt(orders, number)
        elif kind == "take":
            newest = max(rounds, default=0)
            is_offered = newest > number and newest not in halts and "a" in rounds[newest]
            if is_offered:
                assignment = orders.next_assignment(number)
                assert assignment is not None
                assert assignment.round.number == newest
                assert orders.stop_reason(newest) == ""
        for known in rounds:
            assert bool(orders.stop_reason(known)) == (known in halts or known < max(rounds))


def test_recording_settings_are_received_and_removed(orders: OrderState) -> None:
    assert orders.diag_settings() is None
    put(orders, KEYS.diag_settings, DiagSettings(sample_period=3))
    assert orders.diag_settings() == DiagSettings(sample_period=3)
    put(orders, KEYS.diag_settings, b"{")
    assert orders.diag_settings() == DiagSettings(sample_period=3), "an unreadable record changes nothing"
    orders.take(Changes(2, (Change(ChangeKind.DELETE, item(KEYS.diag_settings, b"")),)), ALL)
    assert orders.diag_settings() is None
    put(orders, KEYS.diag_settings, DiagSettings(is_on=False))
    orders.take(Snapshot(9, (), "compacted"), KeyRange.prefix(KEYS.directory("rounds")))
    assert orders.diag_settings() is not None, "a snapshot of something else"
    orders.take(Snapshot(9, (), "compacted"), ALL)
    assert orders.diag_settings() is None
