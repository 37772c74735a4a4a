"""The excerpt of an etcd's log after a failed start: the error, not the stacks of a Go program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain_launcher.etcd.program import lack_of_space, last_errors

WARNING = json.dumps({"level": "warn", "msg": "simple token is not cryptographically signed"})
PANIC = json.dumps({"level": "panic", "msg": "failed to create WAL", "error": "no space left", "stacktrace": "raft.go"})


def test_the_complaint_is_found_before_the_stacks() -> None:
    assert last_errors(f"{WARNING}\n{PANIC}\npanic: failed\n\ngoroutine 1 [running]:\n") == (
        "failed to create WAL: no space left"
    )


def test_unknown_etcd_line_is_reported_unchanged() -> None:
    for text, expected in [
        ("", "(it is empty)"),
        (f"{WARNING}\n", WARNING),
        ("{\n[1]\nan older etcd is on fire\n", "{\n[1]\nan older etcd is on fire"),
        (f"{PANIC[:-1]}\n", PANIC[:-1]),
        ("x" * 3000, "x" * 2000),
    ]:
        assert last_errors(text) == expected, (text, expected)


def test_many_complaints_are_cut_to_the_last() -> None:
    lines = [json.dumps({"level": "error", "msg": f"problem {number}"}) for number in range(9)]
    assert last_errors("\n".join(lines)) == "problem 6\nproblem 7\nproblem 8"


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((2**30, ""), (3 * 2**20, "its disk has 3.15 MB left, and etcd needs 67.1 MB to begin")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert lack_of_space(tmp_path).startswith(expected)
        assert bool(lack_of_space(tmp_path)) is bool(expected)


def test_a_disk_that_is_away_is_not_judged(tmp_path: Path) -> None:
    assert lack_of_space(tmp_path / "missing") == ""
