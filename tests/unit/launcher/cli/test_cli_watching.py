"""`megatrain status --watch`: changes are drawn until the end, on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobEnd
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.commands.live_view import LiveView
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.written_job import fill


class _Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.slow(kept=["True"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_watching_draws_changes_until_the_end(client: EtcdClient, keys: JobKeys, is_terminal: bool) -> None:
    fill(client, keys)
    screen = _Screen(is_terminal=is_terminal)
    polls: list[float] = []

    def now() -> float:
        polls.append(time.time())
        return polls[-1]

    view = LiveView(client, keys, output=screen, now=now, redraw_s=0.05)
    thread = threading.Thread(target=view.run, name="etcd view")
    thread.start()
    try:
        wait_until(lambda: "green, training" in screen.getvalue(), "the first picture")
        num_polls = len(polls)
        wait_until(lambda: len(polls) > num_polls + 4, "some more polls")
        client.delete(keys.host("host-2"))
        wait_until(lambda: "red, training" in screen.getvalue(), "the lost host")
    finally:
        client.put(keys.end, encode(JobEnd(0, "all steps are done", time.time())))
        thread.join()
    text = screen.getvalue()
    assert f"{keys.job}: green, finished: all steps are done" in text
    assert ("\x1b[H" in text) == is_terminal
    if not is_terminal:
        assert text.count(f"\n{keys.job}: ") == 3  # one frame for each change, none for a second that passes


def test_watching_ends_when_its_reader_is_gone(client: EtcdClient, keys: JobKeys) -> None:
    fill(client, keys)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        view = LiveView(client, keys, output=output, redraw_s=0.05)
        errors: list[BaseException] = []

        def watch() -> None:
            try:
                view.run()
            except BrokenPipeError as error:
                errors.append(error)

        thread = threading.Thread(target=watch, name="etcd view")
        thread.start()
        assert os.read(reading, 100)
        os.close(reading)  # as `head` does, and nothing changes afterwards
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert len(errors) == 1


@pytest.mark.slow
def test_watching_reports_that_etcd_does_not_answer(tmp_path: Path) -> None:
    with EtcdServers(tmp_path) as servers:
        keys = JobKeys("demo")
        impatient = EtcdSettings.of(servers.urls, attempt_s=0.2, call_s=0.4)
        with EtcdClient(EtcdSettings.of(servers.urls)) as client, EtcdClient(impatient) as other:
            fill(client, keys)
            screen = _Screen(is_terminal=False)
            thread = threading.Thread(target=LiveView(other, keys, output=screen, redraw_s=0.2).run, name="etcd view")
            thread.start()
            wait_until(lambda: "green, training" in screen.getvalue(), "the first picture")
            member = servers.members[0]
            member.kill()
            wait_until(lambda: "etcd does not answer; this is the state of" in screen.getvalue(), "a word")
            member.start()
            servers.wait_ready()
            client.put(keys.end, encode(JobEnd(0, "all steps are done", time.time())))
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    assert "finished: all steps are done" in screen.getvalue()
