"""docs/guides/launching.md and recovery.md name what the code has: flags, keys, phases, kinds, states, limits."""

from __future__ import annotations

import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import pytest

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
    """Return what stands in backticks in the first column of the table with this header."""
    table = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_phases_of_a_recovery() -> None:
    assert names_in(guide("recovery.md"), "phase") == set(PHASES)


@pytest.mark.parametrize(("heading", "values"), [("kind", IncidentKind), ("state", IncidentState)])
def test_kinds_and_states_of_incidents(heading: str, values: type[StrEnum]) -> None:
    assert names_in(guide("recovery.md"), heading) == {str(value) for value in values}


def test_keys_of_section_recovery() -> None:
    text = guide("recovery.md")
    assert names_in(text, "key") == {field.name for field in fields(RecoveryConfig)}


def test_labels_have_an_answer() -> None:
    answers = guide("recovery.md").split("| failure | answer |", 1)[1].split("\n\n", 1)[0]
    unanswered = {str(label) for label in Label if str(label) not in answers}
    # a victim's label; what is no failure; what has no label
    assert unanswered <= {Label.COLLECTIVE_TIMEOUT, Label.BENIGN, "unknown"}


def test_rendezvous_keys_and_their_limits() -> None:
    text = guide("launching.md").split("| key of `--rdzv-conf` |", 1)[1].split("\n\n", 1)[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)`[^|]* \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)}
    assert {name: (float(row[0]), float(row[1])) for name, row in rows.items()} == _SECONDS


def test_names_of_torchrun_for_what_reaches_etcd() -> None:
    table = guide("launching.md").split("| flag | in `--rdzv-conf` |", 1)[1].split("\n\n", 1)[0]
    assert set(_CONF_KEYS) <= set(re.findall(r"`(\w+)`", table))


def test_health_checks() -> None:
    assert names_in(guide("launching.md"), "check") == {name for check in CHECKS for name in check.names}


def test_exit_codes() -> None:
    table = guide("launching.md").split("| code | meaning |", 1)[1].split("\n\n", 1)[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    of_verbs = {ExitCode.NOT_FOUND, ExitCode.REFUSED}  # of those that ask about a job
    assert codes == {int(code) for code in ExitCode} - of_verbs
    table = (
        (GUIDES.parent / "reference" / "commands.md").read_text(encoding="utf-8").split("| code | name | kind |", 1)[1]
    )
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", table, re.MULTILINE)
    assert all(ExitCode(int(code)).name == name for code, name in rows)
    assert of_verbs < {int(code) for code, _ in rows}
