"""Output of the launcher's commands: unprintable text, and `megatrain status --watch`."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import pytest

from megatrain.contracts.exit_codes import end_text, exit_text
from megatrain.contracts.natural_order import natural_order
from megatrain.contracts.records.incident import IncidentState, Moments
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.notices import Receipt
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobEnd
from megatrain.formatting import (
    age_text,
    count_text,
    names_text,
    ranges_text,
    ranks_text,
    seconds_text,
    short,
    time_text,
)
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs.incident_phrases import cost_text, current_phase, rank_end_text
from megatrain_launcher.commands.incident_text import incident_lines, matching
from megatrain_launcher.commands.live_view import LiveView
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import NOW_S, make_failure, make_incident
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.written_job import fill


def test_durations_are_short() -> None:
    for seconds, text in [
        (-1.0, "0 ms"), (0.0804, "80 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (3.21, "3.2 s"), (9.96, "10 s"),
        (59.4, "59 s"), (59.6, "1 min"), (3569.0, "59 min"), (3600.0, "1 h 0 min"), (47.9 * 3600, "47 h 54 min"),
        (50 * 3600, "2 d 2 h"),
    ]:  # fmt: skip
        assert seconds_text(seconds) == text, seconds


def test_ages_have_whole_seconds_and_none_is_negative() -> None:
    assert [age_text(NOW_S - age, NOW_S) for age in (-5.0, 0.4, 3.6, 59.9, 7200.0)] == [
        "0 s", "0 s", "4 s", "1 min", "2 h 0 min",
    ]  # fmt: skip


def test_a_time_that_no_calendar_has_is_still_printed() -> None:
    assert time_text(0.0) == "1970-01-01 00:00:00 UTC"
    assert time_text(1e18).endswith("s after 1970")


def test_counts_ranks_and_names_are_short() -> None:
    assert (count_text(1, "host"), count_text(1250, "host")) == ("1 host", "1,250 hosts")
    assert (ranks_text([]), ranks_text([3]), ranks_text([0, 1, 2, 6])) == ("", "rank 3", "ranks 0-2, 6")
    assert ranges_text([4, 3, 3, 9]) == "3-4, 9"
    assert [names_text(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert names_text([f"host-{number}" for number in range(1250)], most=3) == "host-0, host-1 and 1,248 more"
    assert short("a\n  b\tc") == "a b c"
    assert short("x" * 50, 10) == "xxxxxxx..."


def test_hosts_are_in_the_order_of_their_numbers() -> None:
    names = ["host-10", "host-2", "host-10a", "a", "host", "host-1", "2", "10"]
    ordered = ["2", "10", "a", "host", "host-1", "host-2", "host-10", "host-10a"]
    assert sorted(names, key=natural_order) == ordered


def test_end_of_a_worker_names_its_signal_or_exit_code() -> None:
    for exit_code, text in [
        (-9, "by SIGKILL (9)"), (-99, "by signal 99"), (0, "with exit code 0"), (42, "with exit code 42"),
        (66, "with exit code 66 (checkpoint)"), (69, "with exit code 69 (communication)"),
    ]:  # fmt: skip
        assert exit_text(exit_code) == text, exit_code
        assert end_text(exit_code) == f"{'was killed' if exit_code < 0 else 'ended'} {text}", exit_code


def test_an_incident_shows_who_was_notified() -> None:
    receipts = (Receipt("slack", "open", NOW_S), Receipt("email", "open", NOW_S, "answers 535", num_failed=1),
                Receipt("pagerduty", "closed", NOW_S, "no answer in time", num_failed=3))  # fmt: skip
    lines = incident_lines(make_incident(receipts=receipts), NOW_S)
    reported = lines[lines.index("notified") + 1 :][:3]
    assert [line.partition(" (")[0].strip() for line in reported] == [
        "slack: notified that it began",
        "email: not notified that it began, after 1 try: answers 535",
        "pagerduty: not notified that it is over, after 3 tries: no answer in time",
    ]


def test_a_failure_shows_label_and_culprit() -> None:
    failure = make_failure(exit_code=1, label="network", culprit="10.0.0.7")
    assert rank_end_text(failure) == "rank 3 ended with exit code 1: network, which names 10.0.0.7"


def test_known_cost_of_an_incident_is_printed() -> None:
    assert cost_text(make_incident()) == "3.2 s, 4 steps lost"
    unclosed = make_incident(moments=Moments(NOW_S - 2, NOW_S - 1, NOW_S - 1), resumed_step=None)
    assert (cost_text(unclosed), current_phase(unclosed), current_phase(make_incident())) == ("", "stop", "")


def test_an_incident_is_found_by_the_beginning_of_its_id() -> None:
    incidents = [make_incident("0001"), make_incident("0011"), make_incident("001", state=IncidentState.HELD)]

    def names(wanted: str) -> list[str]:
        return [one.incident_id for one in matching(incidents, wanted)]

    assert names("20270115-0001") == ["20270115-0001"]
    assert names("20270115-001") == ["20270115-001"]
    assert len(names("2027")) == 3
    assert names("last") == ["20270115-001"]
    assert names("nothing") == []


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
