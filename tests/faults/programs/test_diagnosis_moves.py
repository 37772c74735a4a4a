"""Daemon and page of a job with several hosts: they run on its driver's host, in separate processes, and move with
it."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain.contracts.records.diag_records import DaemonRecord, DashboardRecord
from megatrain.contracts.records.record import RecordType, decode
from megatrain_diagnostics.events.tables import Values
from megatrain_diagnostics.store.reader import StoredEvents
from tests.helpers.processes import descendants
from tests.helpers.recovery_checks import ENDLESS, RunningJob, running_job
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

HOSTS = ("host-0", "host-1")
SPARE = "host-2"
LAST_STEPS = 10
CHANGES = {
    "log": {"interval": 1}, "train": {"steps": ENDLESS}, "checkpoint": {"interval": 20}, "dashboard": {"port": 0},
}  # fmt: skip


def record(running: RunningJob, key: str, kind: type[RecordType]) -> RecordType | None:
    item = running.view.client.get(key)
    return None if item is None else decode(kind, item.value, key)


def daemon(running: RunningJob, other_than: str = "") -> DaemonRecord:
    """Wait for the record of the next daemon, and return it."""

    def found() -> DaemonRecord | None:
        one = record(running, running.view.keys.daemon, DaemonRecord)
        return None if one is None or one.session == other_than else one

    wait_until(lambda: found() is not None, "the daemon")
    one = found()
    assert one is not None
    return one


def page(running: RunningJob, other_than: str = "") -> DashboardRecord:
    def found() -> DashboardRecord | None:
        one = record(running, running.view.keys.dashboard, DashboardRecord)
        return None if one is None or one.session == other_than or not answers(one.url) else one

    wait_until(lambda: found() is not None, "the page")
    one = found()
    assert one is not None
    return one


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}healthz", timeout=DEADLINE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def pids(running: RunningJob, host: str, module: str) -> list[int]:
    """Return the processes of a host that run a module."""
    found = []
    for pid in descendants(running.launched.executors[host].pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if module.encode() in words:
            found.append(pid)
    return found


@contextmanager
def asked_again_and_again(url: str) -> Iterator[list[bool]]:
    """Request the page repeatedly during the block; yields, for each request, whether it was answered."""
    reported: list[bool] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            reported.append(answers(url))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield reported
    finally:
        is_over.set()
        thread.join()


@pytest.mark.timeout(900)
def test_daemon_and_page_each_move_with_the_driver(tmp_path: Path) -> None:
    with running_job(tmp_path, CHANGES, hosts=HOSTS, spare=SPARE, pace_s=0.3, has_daemon=True) as running:
        first, served = daemon(running), page(running)
        driver = running.view.driver()
        others = [host for host in (*HOSTS, SPARE) if host != driver]
        (judging,) = pids(running, driver, "megatrain_diagnostics.daemon")
        assert not any(pids(running, host, "megatrain_diagnostics.daemon") for host in others), "one owner"

        with asked_again_and_again(served.url) as reported:
            os.kill(judging, signal.SIGKILL)
            second = daemon(running, other_than=first.session)
        assert reported
        assert all(reported), "the page answers throughout"
        assert page(running).session == served.session

        running.kill_host(driver)
        third, moved = daemon(running, other_than=second.session), page(running, other_than=served.session)
        assert third.token != second.token
        new = running.view.driver()
        assert new != driver
        assert pids(running, new, "megatrain_diagnostics.daemon")
        assert answers(moved.url)
        assert f"dashboard: {moved.url}" in running.launched.log(new)

        running.launched.wait_for_step(max(running.launched.losses()) + 2 * LAST_STEPS)
        running.save_and_stop()
        last = max(running.launched.losses())
        events = StoredEvents(running.job.files.events)
        values = events.read(Values)
        for rank in range(len(HOSTS)):
            streamed_steps = set(values.step[values.rank == rank].tolist())
            assert set(range(last - LAST_STEPS, last)) <= streamed_steps, f"rank {rank}: streamers found the new daemon"
        assert events.problems() == ()
        running.check_nothing_left()
