"""The audit of verdicts: lines are appended; malformed lines in between are skipped and counted."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.records.host_verdict import (
    AuditEntry,
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.run_files.incidents import append_to_audit, read_audit

VERDICT = HostVerdict(
    "v-1", VerdictKind.STRAGGLER, 3, Cause.COMPUTE, VerdictConfidence.HIGH, 1000.0, "daemon-1", ("host-2",), (4, 5),
    ("slow",), 10, 20, 0.5, 0.1, scores={"host-2": 7.5},
)  # fmt: skip
ENTRY = AuditEntry(VerdictOutcome("v-1", OutcomeKind.WAITING, "waits", "host-1", 1001.0, gain_s=9.5), VERDICT)
LATER = AuditEntry(VerdictOutcome("v-1", OutcomeKind.ACTED, "approved", "host-1", 1002.0, "i-1", "me@login"), VERDICT)
UNREAD = AuditEntry(VerdictOutcome("v-2", OutcomeKind.DECLINED, "cannot be read", "host-1", 1003.0))


def test_appended_outcomes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    assert read_audit(path) == ([], 0)
    for entry in (ENTRY, LATER, UNREAD):
        append_to_audit(path, entry)
    assert read_audit(path) == ([ENTRY, LATER, UNREAD], 0)
    assert path.read_bytes().count(b"\n") == 3


def test_malformed_line_is_skipped_and_counted(tmp_path: Path) -> None:
    for number, junk in enumerate((b'{"schema_version":1,"outco', b"\xff\xfe\x00", b"[" * 5000, b'{"a":1}\n\n')):
        path = tmp_path / f"audit-{number}.jsonl"
        append_to_audit(path, ENTRY)
        with path.open("ab") as file:
            file.write(junk)
        append_to_audit(path, LATER)
        assert read_audit(path) == ([ENTRY, LATER], 1), junk[:20]
