"""Logs with external labels: how many verdicts agree, and that no rule contains one of them verbatim."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain_job.failures.classifier import classify
from megatrain_job.failures.lines import message_start
from megatrain_job.failures.rules.table import ALL_RULES
from tests.helpers.outside_data import outside_data

MAX_SHARE_OF_A_LINE = 0.8


@pytest.fixture(scope="module")
def examples() -> list[dict[str, Any]]:
    file = outside_data(
        "MEGATRAIN_FAILURE_LOGS", "shared/data/failure_logs/examples.jsonl", "the labelled failure logs"
    )
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_labels_and_actions_agree(examples: list[dict[str, Any]]) -> None:
    verdicts = [(example, classify(example["log"])) for example in examples]
    labels = [example["id"] for example, verdict in verdicts if verdict.label != example["label"]]
    actions = [example["id"] for example, verdict in verdicts if verdict.action != example["action"]]
    cascades = [example["id"] for example, verdict in verdicts if verdict.is_cascade != example["cascade"]]

    assert len(labels) <= 0.05 * len(examples), labels
    assert len(actions) <= 0.05 * len(examples), actions
    assert len(cascades) <= 0.1 * len(examples), cascades


def test_benign_examples_raise_no_alarm(examples: list[dict[str, Any]]) -> None:
    benign = [example for example in examples if example["label"] == "benign"]
    alarms = [example["id"] for example in benign if classify(example["log"]).action != "none"]

    assert len(alarms) <= 0.08 * len(benign), alarms


def test_no_rule_is_made_of_one_whole_example(examples: list[dict[str, Any]]) -> None:
    lines = {line for example in examples for line in example["log"].splitlines()}
    messages = {line[message_start(line) :].strip().lower() for line in lines}
    long = [message for message in messages if len(message) > 40]
    by_heart = [
        (rule.name, words, message)
        for rule in ALL_RULES
        for words in rule.alternatives
        for message in long
        if all(word in message for word in words) and sum(map(len, words)) > MAX_SHARE_OF_A_LINE * len(message)
    ]

    assert not by_heart


def test_digits_and_names_of_the_examples_do_not_matter(examples: list[dict[str, Any]]) -> None:
    def changed(log: str) -> str:
        return log.replace("host1", "gpu-a").replace("/opt/env", "/srv/venv").replace("10.", "172.")

    differing = [
        example["id"]
        for example in examples
        if classify(changed(example["log"])).label != classify(example["log"]).label
    ]
    assert not differing
