"""All consequences of a label are in one table; logs with external labels; the table of Xid numbers and its runbook."""

from __future__ import annotations

import ast
import json
import re
from itertools import product
from typing import Any

import pytest

from megatrain_job.failures.classifier import classify
from megatrain_job.failures.lines import message_start
from megatrain_job.failures.rules.table import ALL_RULES
from megatrain_job.failures.verdict import LABELS, Label, label_row
from megatrain_job.failures.xids import VARIANTS, XIDS, XidKind
from megatrain_launcher.health.kernel_log import judge_kernel_log
from tests.helpers.outside_data import outside_data
from tests.helpers.source_tree import ROOT, naming, nodes, python_files, relative

TABLE = ROOT / "launcher" / "megatrain_job" / "failures" / "verdict.py"


def test_every_label_has_a_row() -> None:
    assert set(LABELS) == set(Label)


def test_the_runbook_of_each_label_is_there() -> None:
    pages = {page for label in Label if (page := label_row(label).runbook)}
    assert [page for page in pages if not (ROOT / "docs" / "runbooks" / page).is_file()] == []


def test_unknown_label_counts_against_no_host() -> None:
    # A failure without a label counts: its log shows no cause, as when a process is killed. A label that is missing
    # from the table is a cause that some program did find, and nothing shows that the host is at fault.
    assert label_row("") is LABELS[Label.BENIGN]
    assert label_row("").counts_against_host
    for label in ("unknown", "a_label_of_a_later_version"):
        row = label_row(label)
        assert (row.counts_against_host, row.is_failure, row.is_sign_of_loss) == (False, True, False), label


def test_labels_that_count_against_a_host_are_the_guides() -> None:
    guide = (ROOT / "docs" / "guides" / "recovery.md").read_text(encoding="utf-8")
    listed = guide.split("failures that may be its fault (", 1)[1].split(", or no cause in the log)", 1)[0]
    counting = {label.value for label in Label if label_row(label).counts_against_host}
    assert counting == {*listed.split(", "), Label.BENIGN.value}


def test_code_outside_the_table_lists_and_compares_no_labels() -> None:
    files = [path for path in python_files("launcher") if "rules" not in path.parts and path != TABLE]
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in naming(files, "Label")
        for node in nodes(path, ast.Compare, ast.Tuple, ast.List, ast.Set)
        if (isinstance(node, ast.Compare) and any(map(_is_label, [node.left, *node.comparators])))
        or (isinstance(node, ast.Tuple | ast.List | ast.Set) and sum(map(_is_label, node.elts)) > 1)
    ]
    assert found == []


def _is_label(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Label"


MAX_SHARE_OF_A_LINE = 0.8


@pytest.fixture(scope="module")
def examples() -> list[dict[str, Any]]:
    file = outside_data("MEGATRAIN_FAILURE_LOGS", "shared/data/failure_logs/examples.jsonl", "the labeled failure logs")
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


ROW = re.compile(r"^\| (\d[\d, ]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
KIND_IN_RUNBOOK = {**{kind: str(kind) for kind in XidKind}, XidKind.HANDLED: "handled by the GPU driver"}


def test_the_runbook_has_every_number() -> None:
    text = (ROOT / "docs/runbooks/gpu-errors.md").read_text()
    reported = {
        int(number): (meaning, kind, advice)
        for numbers, meaning, kind, advice in ROW.findall(text)
        for number in numbers.split(",")
    }
    assert reported == {number: (one.meaning, KIND_IN_RUNBOOK[one.kind], one.advice) for number, one in XIDS.items()}
    for one in VARIANTS:
        assert f"| {one.meaning} | {KIND_IN_RUNBOOK[one.kind]} | {one.advice} |" in text


HARDWARE = ("gpu_hardware", "evict_host", False, "failed")
HANDLED = ("gpu_hardware", "restart_then_check", False, "warning")
PROGRAM = ("cuda_illegal_access", "restart_then_check", False, "passed")
MESSAGES = [
    ("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", HARDWARE),
    ("144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x00000000 0x00000000 0x00000000 0x0)", HANDLED),
    ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x4)", HANDLED),
    ("150, MSE Non-fatal XC0 i0 Link 2 (0x1 0x0 0x0 0x0 0x0 0x0)", HANDLED),
    ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000 0x0 0x0 0x0)", HARDWARE),
    ("145, RLW_CTRL Fatal XC1 i0 Link 7 (0x1 0x0 0x0 0x0 0x0 0x0)", HARDWARE),
    ("155, NVLINK: this number has no Nonfatal", HARDWARE),
    ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", HARDWARE),
    ("154, pid='<unknown>', GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", HARDWARE),
    ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x4 (Drain and Reset)", HARDWARE),
    (
        "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        ("benign", "none", False, "passed"),
    ),
    ("63, pid=2359, Row Remapper: New row marked for remapping, reset gpu to activate.", HANDLED),
    ("92, pid=11, name=python, High single-bit ECC error rate", HANDLED),
    ("94, pid=1234, name=python3, Contained ECC error", HANDLED),
    ("94, pid=1234, name=pt_main_thread, Ch 00000008", HANDLED),
    ("95, pid=7, Uncontained ECC error. RST: Yes, D-RST: No", HARDWARE),
    ("45, pid=7, name=python3, Ch 01 caused by previous Xid 149", ("gpu_hardware", "evict_host", True, "passed")),
    ("45, pid=7, name=python3, Ch 0000000c caused by previous Xid 31", (*PROGRAM[:2], True, "passed")),
    ("45, pid=7, name=python3, Ch 0000000c caused by previous Xid 43, Ch 0", (*PROGRAM[:2], True, "passed")),
    ("45, pid=7, name=python3, Ch 00000008", (*PROGRAM[:2], True, "passed")),
    ("31, pid=44439, name=python3, channel 0x00000005, MMU Fault: ENGINE CE0 HUBCLIENT_CE1 faulted", PROGRAM),
    ("999, something that this version does not know", HARDWARE),
]  # fmt: skip


def test_log_and_health_check_judge_a_message_alike() -> None:
    for place, (message, expected) in product(("PCI:0000:3b:00", "PCI:0018:01:00 GPU-I:05"), MESSAGES):
        line = f"NVRM: Xid ({place}): {message}"
        verdict = classify(line)
        finding = judge_kernel_log([b"4,100,9990000000,-;" + line.encode()], now_s=10000.0)
        assert (verdict.label, verdict.action, verdict.is_cascade, finding.outcome) == expected, line
        if expected[0] != "benign":
            assert verdict.culprit == f"gpu {place.split()[0]}", line


def test_a_consequence_and_its_cause() -> None:
    cause = "NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x0 0x0 0x0 0x0 0x0)"
    follows = "NVRM: Xid (PCI:0000:ed:00): 45, pid=7, name=python3, Ch 00000001 caused by previous Xid 149"
    verdict = classify("\n".join([follows, cause, follows]))
    assert (verdict.culprit, verdict.is_cascade) == ("gpu PCI:0000:dc:00", False)


def test_a_corrected_error_is_not_the_cause_of_another_failure() -> None:
    line = "NVRM: Xid (PCI:0000:dc:00): 63, pid=1, Row Remapper: New row marked for remapping, reset gpu to activate."
    assert classify(f"{line}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.").label == "cuda_oom"


def test_a_gpu_that_needs_no_recovery_any_more_is_healthy() -> None:
    def record(gpu: str, text: str, at_s: int) -> bytes:
        return f"4,100,{at_s}000000,-;NVRM: Xid (PCI:0000:{gpu}:00): {text}".encode()

    lines = [
        record("3b", "95, pid=7, Uncontained ECC error", 9000),
        record("3b", "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", 9001),
        record("3b", "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", 9100),
    ]
    assert judge_kernel_log(lines[:2], now_s=10000.0).outcome == "failed"
    assert judge_kernel_log(lines, now_s=10000.0).outcome == "passed"
    finding = judge_kernel_log([*lines, record("5e", "79, GPU has fallen off the bus.", 9050)], now_s=10000.0)
    assert "1 hardware error within" in finding.detail
    assert "PCI:0000:5e:00" in finding.detail
