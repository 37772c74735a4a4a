"""Guides and runbooks agree with the code: flags, keys, phases, kinds, states, limits, reasons of evictions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import PHASES, IncidentKind, IncidentState
from megatrain_job.commands.etcd_flags import _CONF_KEYS
from megatrain_job.failures.verdict import Label
from megatrain_launcher.commands.status import StatusCode
from megatrain_launcher.driver.evictions import EvictionReason
from megatrain_launcher.health.checks import CHECKS
from megatrain_launcher.rendezvous.settings import _SECONDS
from tests.helpers.source_tree import ROOT, naming, nodes, python_files

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def guide(name: str) -> str:
    return (GUIDES / name).read_text(encoding="utf-8")


def names_in(text: str, heading: str) -> set[str]:
    """Return the texts in backticks in the first column of the table with this header."""
    table = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_recovery_guide_has_all_phases_kinds_states_and_keys() -> None:
    text = guide("recovery.md")
    assert names_in(text, "phase") == set(PHASES)
    assert names_in(text, "kind") == set(map(str, IncidentKind))
    assert names_in(text, "state") == set(map(str, IncidentState))
    assert names_in(text, "key") == {field.name for field in fields(RecoveryConfig)}
    # Every label has an answer.
    answers = text.split("| failure | answer |", 1)[1].split("\n\n", 1)[0]
    unanswered = {str(label) for label in Label if str(label) not in answers}
    # the label of a victim; a line that is not a failure
    assert unanswered <= {Label.COLLECTIVE_TIMEOUT, Label.BENIGN}


def test_launching_guide_has_all_rendezvous_keys_and_checks() -> None:
    text = guide("launching.md")
    assert names_in(text, "check") == {name for check in CHECKS for name in check.names}
    table = text.split("| flag | in `--rdzv-conf` |", 1)[1].split("\n\n", 1)[0]
    assert set(_CONF_KEYS) <= set(re.findall(r"`(\w+)`", table))
    table = text.split("| key of `--rdzv-conf` |", 1)[1].split("\n\n", 1)[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)`[^|]* \| ([\d.]+) \| ([\d.]+) \|", table, re.MULTILINE)}
    assert {name: (float(row[0]), float(row[1])) for name, row in rows.items()} == _SECONDS


def test_guide_and_reference_have_all_exit_codes() -> None:
    table = guide("launching.md").split("| code | meaning |", 1)[1].split("\n\n", 1)[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    of_verbs = {ExitCode.NOT_FOUND, ExitCode.REFUSED}  # of the commands that read a job
    assert codes == {int(code) for code in ExitCode} - of_verbs
    reference = (GUIDES.parent / "reference" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", reference.split("| code | name | kind |", 1)[1], re.MULTILINE)
    assert all(ExitCode(int(code)).name == name for code, name in rows)
    assert of_verbs < {int(code) for code, _ in rows}
    rows = re.findall(r"^\| (\d+) \| `([a-z ]+)` \| ([a-z]+)", reference, re.MULTILINE)
    of_status = {(answer if kind == "running" else kind): int(code) for code, kind, answer in rows}
    assert of_status == {code.name.lower().replace("_", " "): int(code) for code in StatusCode}


RUNBOOK = ROOT / "docs" / "runbooks" / "host-evicted-or-cordoned.md"
NAMES = ("EvictionReason", "EVICT")
MODULES = [
    path for path in naming(python_files("launcher/megatrain_launcher/driver"), *NAMES) if path.stem != "evictions"
]
WORDED_ELSEWHERE = {
    ("verdict_actions", "_incident"): "outcome_rules has its text: a verdict that waits has the reason too"
}


def reasons_in(tree: ast.AST) -> set[str]:
    """Return the names of the reasons that a part of a module uses."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "EvictionReason"
    }


def chooses_eviction(function: ast.FunctionDef) -> bool:
    """Return whether a function assigns EVICT as an action, and does not only compare with it."""
    compared = {id(part) for node in ast.walk(function) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    return any(
        isinstance(node, ast.Name) and node.id == "EVICT" and id(node) not in compared for node in ast.walk(function)
    )


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in MODULES:
        yield from ((path, function) for function in nodes(path, ast.FunctionDef))


def test_each_reason_is_used_by_one_function() -> None:
    used = [name for _, function in functions() for name in reasons_in(function)]

    assert sorted(used) == sorted(EvictionReason.__members__)


def test_evictions_take_their_reason_from_the_table() -> None:
    without = {
        (path.stem, function.name)
        for path, function in functions()
        if chooses_eviction(function) and not reasons_in(function)
    }
    assert without == WORDED_ELSEWHERE.keys()


def test_the_runbook_has_the_same_rows() -> None:
    def sentence(reason: EvictionReason) -> str:
        return re.sub(r"\{(\w+)[^}]*\}", lambda found: found[1].upper(), reason.sentence)

    rows = [f"| `{sentence(one)}` | {one.cause} | {'yes' if one.is_cordoned else 'no'} |" for one in EvictionReason]
    found = [line for line in RUNBOOK.read_text().splitlines() if line.startswith("| `")]

    assert found == rows
