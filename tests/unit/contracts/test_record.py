"""Records to JSON and back: nothing changes, invalid JSON is refused; etcd-keys.md agrees with the classes."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import CoordinationError
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
from megatrain.contracts.records.host_records import (
    HangEvidence,
    HostPhase,
    HostStatus,
    Milestones,
    RankEvidence,
    RankFailure,
    RankPosition,
    Stall,
)
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments, phase_seconds
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode, to_plain
from megatrain.contracts.records.rounds import Round, RoundHost

STATUS = HostStatus(
    "host-1", "s1", HostPhase.FAILED, round=3, milestones=Milestones(joined_unix_s=2.5),
    failures=(RankFailure(1, -9, 1.5, label="network"),), stall=Stall("step", 7, 6.0, 5.0, 1.0, (0, 1)),
    lost_hosts=("10.0.0.2",),
)  # fmt: skip
EVIDENCE = HangEvidence(
    "host-1", "s1", 3, 9.5, {"dp:0+2x1": (0, 2, 1)},
    (RankEvidence(0, {"dp:0+2x1": RankPosition(4, 3)}, "T", 7, "step", 9.25),), silent=(1,),
)  # fmt: skip
ROUND = Round(3, 2, (RoundHost("host-1", "s1", "10.0.0.1", 0, 2),), "10.0.0.1", 4711, "first round", "host-1", 1.0)
MOMENTS = Moments(began=1.0, detected=1.25, decided=1.5, halted=2.0, joined=3.0, loaded=3.5, first_step=5.0)
INCIDENT = Incident("i1", IncidentKind.HANG, IncidentState.OPEN, 3, MOMENTS, "because", "restart", notes={"a": "b"})


SECTION = DiagnosticsConfig(eviction="dry-run", daemon_port=1)


def test_record_round_trip() -> None:
    for record in (STATUS, EVIDENCE, ROUND, INCIDENT, SECTION):
        assert decode(type(record), encode(record), "k") == record


def test_defaults_are_left_out_and_come_back() -> None:
    plain = HostStatus("h", "s", HostPhase.PARKED)
    raw = encode(plain)
    assert json.loads(raw) == {"schema_version": 1, "host": "h", "session": "s", "phase": "parked"}
    assert decode(HostStatus, raw, "k") == plain
    assert to_plain(plain)["alive_ranks"] == ""


def test_a_value_that_is_no_choice_names_the_choices() -> None:
    raw = json.dumps({**json.loads(encode(SECTION)), "eviction": "never"})
    with pytest.raises(CoordinationError, match=r"^k: eviction='never'; expected one of automatic, approval, dry-run$"):
        decode(DiagnosticsConfig, raw, "k")


def test_field_of_a_later_version_is_ignored() -> None:
    raw = json.dumps({**json.loads(encode(STATUS)), "color": "blue"})
    assert decode(HostStatus, raw, "k") == STATUS


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"session": 1}, r"^/k: session=1; expected a string$"),
    ({"round": True}, r"^/k: round=True; expected an integer$"),
    ({"round": 2**63}, r"^/k: round=\d+; expected an integer$"),
    ({"phase": "asleep"}, r"^/k: phase='asleep'; expected one of parked, "),
    ({"failures": {}}, r"^/k: failures=\{\}; expected a list$"),
    ({"failures": [{"rank": 1}]}, r"^/k: failures\[0\]: exit_code is missing from a RankFailure$"),
    ({"milestones": {"joined_unix_s": "now"}}, r"^/k: milestones: joined_unix_s='now'; expected a number$"),
    ({"stall": 3}, r"^/k: stall=3; expected an object$"),
    ({"schema_version": 2}, r"^/k: schema_version=2, this program reads 1; use one version on all hosts$"),
    ({"host": None}, r"^/k: host=None; expected a string$"),
    ({"host": "\ud800"}, r"^/k: host='\\ud800'; expected text without lone surrogates"),
]


def test_wrong_field_is_named() -> None:
    for change, message in WRONG_FIELDS:
        raw = json.dumps({**json.loads(encode(STATUS)), **change})
        with pytest.raises(CoordinationError, match=message):
            decode(HostStatus, raw, "/k")


def test_value_that_is_not_an_object_is_refused() -> None:
    for raw in (b"", b"\xff\xfe", b"[]", b"nothing", b"[" * 100_000):
        with pytest.raises(CoordinationError, match=r"^/k: "):
            raise AssertionError(f"accepted {raw[:20]!r}: {decode(HostStatus, raw, '/k')}")


def test_round_finds_the_host_of_a_rank() -> None:
    assert ROUND.part_of("host-1", "s1") == ROUND.hosts[0]
    assert ROUND.part_of("host-1", "another life") is None
    assert ROUND.host_of(1).host == "host-1"
    with pytest.raises(LookupError, match="round 3 has no rank 2"):
        ROUND.host_of(2)


def test_impossible_ranks_of_a_host_are_refused() -> None:
    for change in ({"num_workers": 2**40}, {"first_rank": -1}, {"first_rank": 2**40}):
        value = to_plain(ROUND)
        value["hosts"][0] |= change
        with pytest.raises(CoordinationError, match=r"^/k: hosts\[0\]: first_rank=.* and num_workers=.* of 'host-1'"):
            raise AssertionError(decode(Round, json.dumps({**value, "schema_version": 1}), "/k"))


def test_seconds_of_a_recovery() -> None:
    assert phase_seconds(MOMENTS) == {
        "detect": 0.25,
        "decide": 0.25,
        "stop": 0.5,
        "rendezvous": 1.0,
        "load": 0.5,
        "first_step": 1.5,
    }
    assert phase_seconds(Moments(began=1.0, detected=2.0))["stop"] is None


DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "etcd-keys.md"
MODULES = (diag_records, host_records, host_verdict, incident, job_requests, notices, problem_reports, rounds)
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
