"""Actions are recorded in a hash chain: a break is reported, and two servers write one chain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.records.host_verdict import AuditEntry
from megatrain.contracts.records.record import from_plain, to_plain
from megatrain.run_files.action_log import ACTIONS_NAME, ActionEntry, ActionTrail, chained, read_actions
from megatrain.run_files.incidents import AUDIT_NAME, append_to_audit
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.settings import DashboardSettings
from tests.helpers.action_harness import ADA, BOB, VERDICT, WAITING, ActionHarness, request_of
from tests.helpers.dashboard_server import served


@pytest.fixture
def harness(tmp_path: Path) -> ActionHarness:
    return ActionHarness(tmp_path / "diagnosis" / ACTIONS_NAME)


def test_a_broken_chain_is_reported_and_not_repaired(harness: ActionHarness) -> None:
    for number in range(3):
        harness.take("checkpoint", key=f"key-{number:08d}")
    good = harness.path.read_bytes()
    lines = good.splitlines(keepends=True)
    changed = json.loads(lines[2])
    changed["user"] = "eve"
    rehashed = encode_with_hash(changed)
    broken = {
        "changed": [*lines[:2], json.dumps(changed).encode() + b"\n", *lines[3:]],
        "changed with its hash": [*lines[:2], rehashed, *lines[3:]],
        "the newest changed": [*lines[:-1], lines[-1].replace(b'"ada"', b'"eve"')],
        "removed": [*lines[:2], *lines[3:]],
        "the first removed": lines[1:],
        "swapped": [lines[1], lines[0], *lines[2:]],
        "damaged": [*lines[:2], lines[2][:40] + b"\n", *lines[3:]],
        "made up": [*lines[:2], b'{"schema_version": 1, "user": "eve"}\n', *lines[2:]],
        "no JSON": [*lines[:2], b"\xff\xfe\n", *lines[2:]],
    }
    for name, content in broken.items():
        harness.path.write_bytes(b"".join(content))
        assert ACTIONS_NAME in read_actions(harness.path).problem, name
    problem = read_actions(harness.path).problem
    before = harness.path.read_bytes()
    harness.handler = harness.opened()
    harness.take("checkpoint", key="key-after-that")
    assert harness.path.read_bytes().startswith(before)
    assert read_actions(harness.path).problem == problem
    harness.path.write_bytes(good)
    assert read_actions(harness.path).problem == ""


def encode_with_hash(plain: dict[str, Any]) -> bytes:
    entry = chained(from_plain(ActionEntry, plain, "test"))
    return json.dumps({"schema_version": 1, **to_plain(entry)}).encode() + b"\n"


def test_removed_end_of_the_audit_is_reported(harness: ActionHarness) -> None:
    harness.take("checkpoint")
    harness.take("checkpoint", key="key-00000002")
    lines = harness.path.read_bytes().splitlines(keepends=True)
    harness.path.write_bytes(b"".join(lines[:2]))
    assert "lines were removed" in harness.handler.trail().problem
    harness.take("checkpoint", key="key-00000003")  # and does not hide the missing entries
    assert "lines were removed" in harness.handler.trail().problem


def test_two_servers_share_limits_and_keys(harness: ActionHarness) -> None:
    """Lines that the other server writes between our read and our own line count as well."""
    other = harness.opened()
    harness.take("checkpoint")
    blind = ActionHandler(harness.backend, harness.log, clock=lambda: harness.now_s)
    blind._trail = lambda: ActionTrail()  # type: ignore[method-assign]
    for number in range(4):
        other.take(request_of("restart", key=f"key-b-{number:08d}"), BOB)
    for request, reported in (
        (request_of("restart", key="key-c-00000001"), "4 an hour"),
        (request_of(key="key-00000001"), "used"),
    ):
        with pytest.raises(RefusalError, match=reported):
            blind.take(request, ADA)
    assert len(harness.backend.done) == 5


def test_line_after_a_torn_one_is_read(harness: ActionHarness) -> None:
    harness.take("checkpoint")
    with harness.path.open("ab") as file:
        file.write(b'{"schema_version":1,"stage":"int')
    harness.handler = harness.opened()
    assert harness.take("checkpoint", key="key-00000002").is_accepted
    trail = read_actions(harness.path)
    assert len(trail.entries) == 4
    assert trail.problem == f"{ACTIONS_NAME}:3 is damaged"


def test_two_servers_write_one_chain(harness: ActionHarness) -> None:
    other = harness.opened()
    for number in range(3):
        harness.take("checkpoint", key=f"key-a-{number:08d}")
        other.take(request_of(key=f"key-b-{number:08d}"), BOB)
    trail = read_actions(harness.path)
    assert (len(trail.entries), trail.problem) == (12, "")


def test_page_shows_both_audits_and_removed_lines(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.incidents.mkdir()
    append_to_audit(run.incidents / AUDIT_NAME, AuditEntry(replace(WAITING, by="ops@login"), VERDICT))
    harness = ActionHarness(run.diagnosis / ACTIONS_NAME)
    harness.now_s += 60
    harness.take("restart")
    with served(tmp_path, DashboardSettings(port=0), harness.handler) as server:
        reported = server.ask("/api/v1/audit")
        assert server.ask("/api/v1/audit", {"If-None-Match": reported.headers["etag"]}).status == 304
        first, second = reported.json["entries"]
        expected = ("dashboard", "ada", "restart", "being done")
        assert (first["source"], first["actor"], first["action"], first["result"]) == expected
        assert len(first["entry_hash"]) == 64
        assert (second["source"], second["actor"], second["target"]) == ("driver", "ops@login", "host-2")
        assert reported.json["chain_problem"] == ""
        lines = harness.path.read_bytes().splitlines(keepends=True)
        harness.path.write_bytes(lines[0])
        assert "lines were removed" in server.ask("/api/v1/audit").json["chain_problem"]
        harness.path.write_bytes(lines[1])
        assert "does not follow" in server.ask("/api/v1/audit").json["chain_problem"]
