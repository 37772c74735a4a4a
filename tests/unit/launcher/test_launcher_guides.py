"""docs/guides/launching.md and recovery.md agree with the code: flags, keys, phases, kinds, states, limits."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import PHASES, IncidentKind, IncidentState
from megatrain_job.commands.etcd_flags import _CONF_KEYS
from megatrain_job.failures.verdict import Label
from megatrain_launcher.health.checks import CHECKS
from megatrain_launcher.rendezvous.settings import _SECONDS

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
    table = (
        (GUIDES.parent / "reference" / "commands.md").read_text(encoding="utf-8").split("| code | name | kind |", 1)[1]
    )
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", table, re.MULTILINE)
    assert all(ExitCode(int(code)).name == name for code, name in rows)
    assert of_verbs < {int(code) for code, _ in rows}
