"""docs/reference/etcd-keys.md agrees with contracts/records/job_keys.py and the records' classes."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatrain.contracts.records import (
    diag_records,
    host_records,
    host_verdict,
    incident,
    job_keys,
    job_requests,
    notices,
    problem_reports,
    rounds,
)
from megatrain.contracts.records.job_keys import JobKeys

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "etcd-keys.md"
MODULES = (
    diag_records,
    host_records,
    host_verdict,
    incident,
    job_requests,
    notices,
    problem_reports,
    rounds,
)
RECORDS: dict[str, Any] = {
    name: kind for module in MODULES for name, kind in vars(module).items() if is_dataclass(kind)
}


def key_table() -> list[tuple[str, str]]:
    """Return the documented keys with their values' records."""
    section = DOCUMENT.read_text(encoding="ascii").split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \| (\w*) ?\|", section, re.MULTILINE)


def field_tables() -> dict[str, list[tuple[str, str]]]:
    """Return record -> (field, type) for each heading that names a record."""
    sections = re.split(r"^## (\w+)\n", DOCUMENT.read_text(encoding="ascii"), flags=re.MULTILINE)[1:]
    pairs = zip(sections[::2], sections[1::2], strict=True)
    return {name: re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE) for name, text in pairs if name in RECORDS}


def coded_fields(kind: Any) -> list[tuple[str, str]]:
    return [(field.name, ast.unparse(ast.parse(str(field.type))).replace("|", "or")) for field in fields(kind)]


def test_the_keys_are_those_of_the_code() -> None:
    reported = re.findall(r"^    /megatrain/<job>/(\S+)\s+(?:([A-Z]\w+)\s)?", job_keys.__doc__ or "", re.MULTILINE)
    expected = [(key.replace("driver/...", "driver/<lease>"), record) for key, record in reported]
    assert sorted(key_table()) == sorted(expected)


def test_the_keys_are_those_that_the_functions_make() -> None:
    keys = JobKeys("my")
    made = {
        keys.record, keys.end, keys.report, f"{keys.election}/<lease>", keys.host("<host>"), keys.status("<host>"),
        keys.round(7), keys.halt(7), keys.deadlines(7), keys.evidence(7, "<host>"), keys.command(7),
        keys.request("<id>"),
        keys.diag_settings, keys.daemon, keys.daemon_report, keys.dashboard, keys.verdict("<id>"), keys.outcome("<id>"),
        keys.answer("<id>"), keys.check("<id>", "<host>"), keys.cordon("<host>"), keys.incident("<id>"),
        keys.problem("<source>"),
        keys.notices("<receiver>"),
    }  # fmt: skip
    documented = {keys.prefix + key.replace("<number>", "00000007") for key, _ in key_table()}
    assert documented == made


def test_each_value_has_a_table() -> None:
    assert {record for _, record in key_table() if record} <= field_tables().keys()


def test_the_fields_are_those_of_the_records() -> None:
    assert field_tables() == {name: coded_fields(kind) for name, kind in RECORDS.items()}
