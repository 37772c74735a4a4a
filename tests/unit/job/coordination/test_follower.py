"""Threads that must not end: a failure is reported once, and the thread restarts; the time without events is known."""

from __future__ import annotations

import base64
import itertools
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination import restarting_thread
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.operation_responses import RangeResponse
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Changes, Snapshot, WatchEvent
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting_thread, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restarting_thread, "_WELL_S", 0.3)


def test_failed_thread_restarts_and_reports_it_once(short_pauses: None, caplog: pytest.LogCaptureFixture) -> None:
    closed, began, numbers = threading.Event(), threading.Event(), itertools.count()

    def run() -> None:
        number = next(numbers)
        if number < 3:
            raise ValueError("the same")
        if number == 3:
            raise CoordinationError("another")
        began.set()
        closed.wait()

    with caplog.at_level(logging.ERROR):
        thread = RestartingThread("watchman", run, closed)
        assert began.wait(DEADLINE_S)
        assert thread.problem == "watchman failed: another"
        wait_until(lambda: thread.problem == "", "it to work for a while")
        closed.set()
        thread.join(DEADLINE_S)

    assert not thread.is_alive
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [
        "watchman failed: ValueError: the same; it starts again", "watchman failed: another; it starts again",
    ]  # fmt: skip
    assert [bool(record.exc_info) for record in caplog.records] == [True, False], "the place of our error"


def test_thread_of_an_ending_program_does_not_restart(short_pauses: None) -> None:
    closed = threading.Event()

    def run() -> None:
        closed.set()
        raise ValueError("at the end")

    thread = RestartingThread("watchman", run, closed)
    thread.join(DEADLINE_S)
    assert not thread.is_alive


class FollowingConsumer:
    """Receives events; fails on those that `fails` selects."""

    def __init__(self) -> None:
        self.seen: list[WatchEvent] = []
        self.fails: Iterator[bool] = itertools.repeat(False)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def take(self, event: WatchEvent) -> None:
        self.may_go_on.wait()
        if next(self.fails):
            raise KeyError("a mistake in what takes events")
        self.seen.append(event)

    def has(self, key: str) -> bool:
        return any(item.key == key.encode() for event in self.seen for item in event.written)


def test_failing_consumer_loses_no_event(short_pauses: None, client: EtcdClient, prefix: str) -> None:
    consumer = FollowingConsumer()
    consumer.fails = iter([False, True, True, *[False] * 100])
    with Follower(client, KeyRange.prefix(prefix), consumer.take) as follower:
        wait_until(lambda: len(consumer.seen) == 1, "the beginning")
        client.put(prefix + "a", "")

        wait_until(lambda: consumer.has(prefix + "a"), "the key that could not be processed")
        assert [type(event) for event in consumer.seen] == [Snapshot, Snapshot]
        client.put(prefix + "b", "")
        wait_until(lambda: consumer.has(prefix + "b"), "what comes later")
        assert isinstance(consumer.seen[-1], Changes)
        wait_until(lambda: follower.problem == "", "the problem to be over")


@pytest.mark.slow
def test_follower_whose_consumer_always_fails_receives_nothing(
    short_pauses: None, client: EtcdClient, prefix: str
) -> None:
    consumer = FollowingConsumer()
    consumer.fails = itertools.repeat(True)
    with Follower(client, KeyRange.prefix(prefix), consumer.take) as follower:
        began = time.monotonic()
        wait_until(lambda: "KeyError" in follower.problem, "the error to be reported")
        wait_until(lambda: follower.unconfirmed_s > 1.0, "no event to be processed for a second")
        elapsed_s = time.monotonic() - began
        assert follower.unconfirmed_s >= elapsed_s, "failed tries do not count as processed"
        assert not consumer.seen
        consumer.fails = itertools.repeat(False)
        wait_until(lambda: follower.unconfirmed_s < 1.0, "an event to arrive")
        wait_until(lambda: follower.problem == "", "the problem to be over")
        assert [type(event) for event in consumer.seen][:1] == [Snapshot]


def test_event_that_is_never_processed_counts_as_not_received(client: EtcdClient, prefix: str) -> None:
    consumer = FollowingConsumer()
    consumer.may_go_on.clear()
    with Follower(client, KeyRange.prefix(prefix), consumer.take) as follower:

        def is_deaf() -> bool:
            client.get(prefix)  # proves that the member is up to date, and does not depend on the receivers of events
            return follower.unconfirmed_s > 0.4

        wait_until(is_deaf, "the event to be stuck for a while")
        assert not consumer.seen
        consumer.may_go_on.set()
        wait_until(lambda: follower.unconfirmed_s < 0.4, "it to continue")
        assert [type(event) for event in consumer.seen][:1] == [Snapshot]


@pytest.mark.slow
def test_watch_that_fails_at_each_event_is_not_confirmed(etcd: EtcdServers, prefix: str) -> None:
    """Each stream is opened correctly and breaks at its first event: the problem lasts until an event gets through."""
    created = b'HTTP/1.1 200 OK\r\n\r\n{"result":{"created":true}}\n'
    broken = b'{"result":{"header":{"revision":"999999999"},"events":[7]}}\n'
    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as writer,
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, KeyRange.prefix(prefix)) as watch,
    ):
        wait_until(lambda: watch.confirmed_at is not None, "the watch to be open")
        proxy.corrupts = lambda request: b"/v3/watch" in request
        proxy.garbage, proxy.conduct = [created + broken], Conduct.GARBAGE
        proxy.cut()
        wait_until(lambda: proxy.num_corrupted == 1, "the watch to break")
        confirmed_at = watch.confirmed_at
        wait_until(lambda: proxy.num_corrupted > 4, "a few more tries")
        client.get(prefix)  # etcd answers calls during all this time.

        assert (watch.confirmed_at, "not a list of objects" in watch.problem) == (confirmed_at, True)
        proxy.conduct = Conduct.PASS
        written = writer.put(prefix + "a", "")
        event = [watch.next(DEADLINE_S), watch.next(DEADLINE_S)][-1]
        assert isinstance(event, Changes)
        assert event.revision == written
        wait_until(lambda: watch.problem == "" and watch.confirmed_at != confirmed_at, "the problem to be over")


def test_garbage_for_one_watch_breaks_no_other(etcd: EtcdServers, prefix: str) -> None:
    """The streams of a frozen member are closed, so that other members are used. A member that answers garbage is not
    frozen."""
    corrupted, whole = KeyRange.prefix(prefix + "corrupted/"), KeyRange.prefix(prefix + "whole/")
    mark = base64.b64encode(corrupted.start)
    with (
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        Watch(client, whole) as watch,
    ):
        wait_until(lambda: watch.confirmed_at is not None, "the watch to be open")
        proxy.corrupts = lambda request: b"/v3/watch" in request and mark in request
        proxy.conduct = Conduct.GARBAGE
        with Watch(client, corrupted) as broken:
            wait_until(lambda: proxy.num_corrupted > 2, "a few tries")
            assert (broken.confirmed_at, watch.problem) == (None, "")
            client.put(prefix + "whole/a", "")
            assert [type(watch.next(DEADLINE_S)) for _ in range(2)] == [Snapshot, Changes]


def test_idle_watch_is_current_as_long_as_its_member_answers(client: EtcdClient, prefix: str) -> None:
    with Watch(client, KeyRange.prefix(prefix)) as watch:
        wait_until(lambda: watch.confirmed_at is not None, "the watch to be open")
        before = watch.confirmed_at
        client.get(prefix)
        assert watch.confirmed_at != before


class MistakenClient(EtcdClient):
    """Raises our own errors, not etcd's, as long as `mistakes` has any."""

    def __init__(self, settings: EtcdSettings) -> None:
        super().__init__(settings)
        self.mistakes: Iterator[Exception] = iter(())
        self.renewed = threading.Event()

    def read_all(self, keys: KeyRange, *, has_values: bool = True, page_keys: int = 500) -> RangeResponse:
        for mistake in self.mistakes:
            raise mistake
        return super().read_all(keys, has_values=has_values, page_keys=page_keys)

    def renew_lease(self, lease_id: int, *, deadline_s: float | None = None) -> int:
        for mistake in self.mistakes:
            raise mistake
        ttl_s = super().renew_lease(lease_id, deadline_s=deadline_s)
        self.renewed.set()
        return ttl_s


@pytest.fixture
def mistaken(etcd: EtcdServers) -> Iterator[MistakenClient]:
    with MistakenClient(EtcdSettings.of(etcd.urls)) as client:
        yield client


def test_program_error_ends_no_watch(mistaken: MistakenClient, prefix: str) -> None:
    may_go_on = threading.Event()

    def mistakes() -> Iterator[Exception]:
        yield ZeroDivisionError("a mistake")
        may_go_on.wait(DEADLINE_S)
        yield ZeroDivisionError("a mistake")

    mistaken.mistakes = mistakes()
    with Watch(mistaken, KeyRange.prefix(prefix)) as watch:
        wait_until(lambda: watch.problem == "ZeroDivisionError: a mistake", "the mistake")
        may_go_on.set()
        assert isinstance(watch.next(DEADLINE_S), Snapshot)
        mistaken.put(prefix + "a", "")

        assert isinstance(watch.next(DEADLINE_S), Changes)
        wait_until(lambda: watch.problem == "", "the problem to be over")


def test_program_error_ends_no_lease(
    short_pauses: None, mistaken: MistakenClient, caplog: pytest.LogCaptureFixture
) -> None:
    mistaken.mistakes = iter([ZeroDivisionError("a mistake")])
    with LeaseKeeper(mistaken, ttl_s=5, period_s=0.05) as keeper:
        assert mistaken.renewed.wait(DEADLINE_S)
        assert keeper.state is LeaseState.HELD
    assert "ZeroDivisionError: a mistake; it starts again" in caplog.text
