"""A real Alertmanager accepts our alerts, keeps them while they are repeated, and resolves them when they are over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.programs.processes import install_parent_death_guard
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.message import PageLinks
from megatrain_launcher.notify.receivers import receivers_of
from megatrain_launcher.notify.sender import NoticeSender, SenderParts
from megatrain_launcher.notify.topic_follower import TopicSnapshot
from megatrain_launcher.notify.topics import Event, Topic
from tests.helpers.http_receiver import HttpReceiver
from tests.helpers.notification_topics import NOW_S, config_with, make_message, make_topic, over
from tests.helpers.ports import free_ports
from tests.helpers.require import require
from tests.helpers.waiting import DEADLINE_S, wait_until

CONFIG = "route: {receiver: none}\nreceivers: [{name: none}]\n"


@contextmanager
def alertmanager(directory: Path) -> Iterator[str]:
    """Run an Alertmanager; yield its address."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    require("alertmanager", found=program is not None, reason="not on PATH (Debian: prometheus-alertmanager)")
    assert program is not None
    (directory / "alertmanager.yml").write_text(CONFIG)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (directory / "alertmanager.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program, f"--config.file={directory / 'alertmanager.yml'}", f"--storage.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
            ],
            stdout=log, stderr=log, preexec_fn=partial(install_parent_death_guard, os.getpid()),
        )  # fmt: skip
    try:
        wait_until(lambda: _get(f"{url}/api/v2/status") is not None, "the Alertmanager")
        yield url
    finally:
        process.kill()
        process.wait()


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return json.load(answer)
    except OSError:
        return None


class JobSnapshots:
    """Topics of a job at several moments, and an etcd that accepts every record."""

    def __init__(self, *moments: Topic) -> None:
        self.left = [TopicSnapshot(number, (one,), PageLinks(), 9.0) for number, one in enumerate(moments, 1)]

    def next(self, *_: object) -> TopicSnapshot:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def get(self, key: str) -> None:
        return None

    def txn(self, *_: object, **more: object) -> Any:
        return SimpleNamespace(succeeded=True, revision=1)


def test_alert_of_the_former_level_ends_in_the_same_post(tmp_path: Path) -> None:
    topic = make_topic("restarts", event=Event.RESTARTS)
    story: Any = JobSnapshots(topic, replace(topic, level=HealthLevel.RED))
    leadership: Any = SimpleNamespace(key="leader", token=1, is_certain=True)
    with HttpReceiver() as server:
        (receiver,) = receivers_of(config_with(tmp_path, f'[alertmanager]\nurl = "{server.url}"\n'))
        sender = NoticeSender(SenderParts(story, JobKeys("demo"), leadership, story, lambda: NOW_S), receiver)
        _, second = server.wait_for(2)
        sender.join(DEADLINE_S)
    assert [(one["labels"]["severity"], one["endsAt"]) for one in second] == [
        ("critical", "2027-01-15T08:05:00.000Z"), ("warning", "2027-01-15T08:00:00.000Z"),
    ]  # fmt: skip


@pytest.mark.slow
def test_alerts_fire_and_are_over(tmp_path: Path) -> None:
    now_s = time.time()
    with alertmanager(tmp_path) as url:
        (receiver,) = receivers_of(config_with(tmp_path, f'[alertmanager]\nurl = "{url}"\n'))
        topic = make_topic(began_unix_s=now_s - 2.0)
        other = replace(topic, name="incident/other")
        receiver.try_once(make_message(topic, other, now_unix_s=now_s))
        wait_until(lambda: len(_get(f"{url}/api/v2/alerts") or []) == 2, "two alerts")
        found = {one["labels"]["topic"]: one for one in _get(f"{url}/api/v2/alerts")}
        one = found["incident/one"]
        assert one["status"]["state"] == "active"
        assert one["labels"]["alertname"] == "MegatrainIncident"
        assert one["annotations"]["runbook_url"].endswith("worker-ended.md")
        # A repetition with another text is the same alert.
        receiver.try_once(make_message(replace(topic, what="known better"), other, now_unix_s=now_s))
        wait_until(lambda: "known better" in json.dumps(_get(f"{url}/api/v2/alerts")), "the new text")
        assert len(_get(f"{url}/api/v2/alerts")) == 2
        receiver.try_once(make_message(over(topic, now_s - 1.0), now_unix_s=now_s))
        wait_until(lambda: len(_get(f"{url}/api/v2/alerts")) == 1, "the end of one")
        assert [one["labels"]["topic"] for one in _get(f"{url}/api/v2/alerts")] == ["incident/other"]
