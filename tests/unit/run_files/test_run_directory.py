"""The paths of a run's files, safe names of black boxes, and the audit of verdicts."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
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
from megatrain.run_files.run_directory import RunDirectory, black_box_path, own_box_directory


def test_create_makes_every_directory_and_may_be_repeated(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "demo")
    run.create()
    run.create()
    names = ["checkpoints", "diagnosis", "events", "incidents", "logs", "metrics"]
    assert sorted(path.name for path in run.root.iterdir()) == names
    assert run.checkpoints == run.root / "checkpoints"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"1\. job\.run_directory='.*file/run': cannot create .*: Not a directory"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_query_of_another_users_run_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert RunDirectory(tmp_path).holder() is None
    assert not RunDirectory(tmp_path).was_held_here()


def test_black_box_names_are_readable_where_they_can_be() -> None:
    path = black_box_path(Path("/dev/shm"), "gpt-125m", "1a2b3c4d", "main", 3, 17)
    assert path == Path(
        f"/dev/shm/megatrain-{os.geteuid()}/megatrain.gpt-125m.1a2b3c4d.main.000003.rank-00017.blackbox"
    )


def test_black_box_names_are_safe_and_distinct() -> None:
    names = ["a", "a/b", "a_b", "a.b", "../../etc/passwd", "", " ", "j" * 200, "j" * 201, "tr\u00e4um"]  # fmt: skip
    paths = [
        black_box_path(Path("d"), job, "1a2b3c4d", branch, round_number, rank)
        for job, branch in itertools.product(names, names)
        for round_number, rank in ((0, 1), (1, 0))
    ]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert path.parent == own_box_directory(Path("d"))
        assert re.fullmatch(r"megatrain\.[\w-]+\.1a2b3c4d\.[\w-]+\.\d{6}\.rank-\d{5}\.blackbox", path.name, re.ASCII)
        assert len(path.name) < 200


def test_runs_of_one_job_name_have_keys_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {RunDirectory(root).key for root in (Path("runs/a"), Path("runs/b"), tmp_path / "c")}
    assert len(keys) == 3
    assert RunDirectory(Path("runs/a")).key == RunDirectory(tmp_path / "runs" / "a").key


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
