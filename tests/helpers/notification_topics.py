"""Topics, records and messages for tests of notifications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.message import Message, PageLinks
from megatrain_launcher.notify.plan import DeliveryMode, Plan, Rules, plan_of, taken
from megatrain_launcher.notify.topics import Event, Stage, Topic

NOW_S = 1_800_000_000.0
LINKS = PageLinks("https://page.example/megatrain", "https://docs.example/runbooks")
EVERYTHING = frozenset(map(str, Event))


def make_topic(name: str = "incident/one", **changes: Any) -> Topic:
    """Return an incident that has just begun; changes replace fields."""
    topic = Topic(
        name=name, event=Event.INCIDENT, level=HealthLevel.AMBER, stage=Stage.OPEN,
        what="a worker ended: rank 3 on host-2 was killed by SIGKILL (9)", began_unix_s=NOW_S - 2.0,
        ready_unix_s=NOW_S - 2.0, hosts=("host-2",), ranks=(3,), step=1234, cost="no step completed since",
        activity="the job responds with restart and continues by itself", action="no action is needed",
        runbook="worker-ended.md", route="incidents/one",
    )  # fmt: skip
    return replace(topic, **changes)


def over(topic: Topic, at_unix_s: float = NOW_S) -> Topic:
    """Return a topic at its end."""
    return replace(topic, stage=Stage.CLOSED, ended_unix_s=at_unix_s, ready_unix_s=0.0, cost="3.2 s, 4 steps lost",
                   activity="the job trains again since step 1,230")  # fmt: skip


def make_message(*topics: Topic, **changes: Any) -> Message:
    return replace(Message("demo", topics or (make_topic(),), LINKS, NOW_S), **changes)


def rules(
    delivery_mode: DeliveryMode, level: HealthLevel = HealthLevel.AMBER, events: frozenset[str] = EVERYTHING
) -> Rules:
    return Rules(delivery_mode, level, events)


class InstantReceiver:
    """A receiver that accepts everything at once, and stores the messages as lists of topics."""

    def __init__(self, delivery_mode: DeliveryMode, **more: Any) -> None:
        self.rules = rules(delivery_mode, **more)
        self.record = ReceiverRecord("test")
        self.messages: list[tuple[Topic, ...]] = []
        self.times: list[float] = []
        self.refreshed_s = 0.0

    def send_due(self, topics: Sequence[Topic], now_s: float) -> Plan:
        """Send everything that is due now; return the first plan with nothing more to send."""
        while True:
            plan = plan_of(topics, self.record, self.rules, now_s, self.refreshed_s)
            self.record = plan.record
            if not plan.topics:
                return plan
            self.record = taken(plan.record, plan, now_s)
            self.refreshed_s = now_s
            self.messages.append(plan.topics)
            self.times.append(now_s)

    @property
    def marks(self) -> list[list[str]]:
        return [[f"{topic.name}={topic.mark}" for topic in message] for message in self.messages]


def write_secret(path: Path, text: str, mode: int = 0o600) -> str:
    """Write a secret's file, and return its path."""
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return str(path)


SMALL = """\
[job]
name = "demo"
[model]
num_layers = 2
hidden_size = 64
num_heads = 4
vocab_size = 64
seq_len = 32
[batch]
micro_batch_size = 1
global_batch_size = 4
[train]
steps = 10
[optimizer]
lr = 1e-3
"""


def config_with(directory: Path, sections: str) -> Config:
    """Return a small configuration with these sections."""
    path = directory / "config.toml"
    path.write_text(SMALL + sections)
    return load_config(path).config
