"""Stages of the gate and of the nightly run: order, figures, and the published table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child_process import in_child
from tests.helpers.suite_pages import (
    bars_of_runs,
    limits,
    package_rows,
    recent_runs,
    replaced,
    stage_rows,
)
from tests.helpers.waiting import DEADLINE_S
from tests.stages import ROOT, clocks_s, make_target, run_stages, summary


class FakeMake:
    """Replaces make: each target takes seconds on a separate clock, and has runs of pytest and an exit code."""

    def __init__(self, targets: dict[str, tuple[float, Sequence[dict[str, Any]], int]]) -> None:
        self.now_s, self.cpu_s = 100.0, 7.0
        self.made: list[str] = []
        self._targets = targets

    def __call__(self, target: str, record: Path) -> int:
        seconds, runs, code = self._targets[target]
        self.made.append(target)
        self.now_s += seconds
        self.cpu_s += seconds * 1.5
        if runs:
            record.write_text("".join(json.dumps(run) + "\n" for run in runs))
        return code

    def clocks_s(self) -> tuple[float, float]:
        return self.now_s, self.cpu_s


def run_of(passed: int, skipped: int = 0, unstable: Sequence[str] = (), **seconds: float) -> dict[str, Any]:
    return {"passed": passed, "skipped": skipped, "failed": 0, "unstable": list(unstable), "seconds": seconds}


def test_target_has_its_seconds_and_the_tests_of_all_runs(tmp_path: Path) -> None:
    make = FakeMake({
        "venv": (40.2, [], 0),
        "test": (300.0, [run_of(9000, 26, ["tests/a.py::one"], dist=200.0)], 0),
        "smoke": (60.0, [run_of(3, dist=2.0), run_of(73, 1, dist=1.5, web=8.0)], 0),
    })  # fmt: skip

    failures, rows = run_stages(["venv", "test", "smoke"], make, make.clocks_s, tmp_path, ends_at=["venv"])

    assert failures == {}
    columns = ("stage", "seconds", "cpu_seconds", "passed", "skipped", "unstable", "packages")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("venv", 40, 60, 0, 0, "none", {}),
        ("test", 300, 450, 9000, 26, "tests/a.py::one", {"dist": 200.0}),
        ("smoke", 60, 90, 76, 1, "none", {"dist": 3.5, "web": 8.0}),
    ]
    assert summary(rows, failures).splitlines()[-2:] == [
        "all                     400 s",
        "UNSTABLE in test: tests/a.py::one",
    ]


@pytest.mark.parametrize(
    ("ends_at", "made", "failures"),
    [
        (["check", "test", "smoke"], ["check"], {"check": 2}),
        (["venv"], ["check", "test", "smoke"], {"check": 2, "smoke": 1}),
        (["smoke"], ["check", "test", "smoke"], {"check": 2, "smoke": 1}),
    ],
)
def test_a_failed_target_ends_the_stages_where_it_should(
    tmp_path: Path, ends_at: list[str], made: list[str], failures: dict[str, int]
) -> None:
    make = FakeMake({"check": (50.0, [], 2), "test": (300.0, [], 0), "smoke": (9.0, [], 1)})

    found, rows = run_stages(["check", "test", "smoke"], make, make.clocks_s, tmp_path, ends_at=ends_at)

    assert (found, make.made) == (failures, made)
    expected = [f"{target} failed with exit code {code}" for target, code in failures.items()]
    assert summary(rows, found).splitlines()[-len(failures) :] == expected


KILLED = """
import os, signal
from tests.stages import busy_processes
with busy_processes(1):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_busy_processes_end_with_a_killed_parent() -> None:
    # the busy process has the same output, which ends when both have ended
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, check=False, timeout=DEADLINE_S
    )

    assert done.returncode == -signal.SIGKILL


ORPHAN = """#!/bin/sh
trap '' HUP
(exec %s -c 'import time
while time.process_time() < 0.4: pass') &
exit 3
"""


def test_cpu_time_of_orphans_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "make"
    program.write_text(ORPHAN % sys.executable)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))

    def make() -> None:
        _, begin_s = clocks_s()
        assert make_target("test", tmp_path / "record.jsonl") == 3
        # the orphan used 0.4 s by its own clock; the kernel counts the times of children in ticks, which it samples
        assert clocks_s()[1] - begin_s > 0.2

    assert in_child(make) == 0


def row_of(run: str, stage: str, seconds: int, busy: int = 0, **more: object) -> dict[str, Any]:
    about = {"run": run, "date": "2026-11-30", "commit": "79b8cb7937", "busy": busy, "stage": stage, "passed": 9}
    return {
        **about,
        "seconds": seconds,
        "reference_ms": 120,
        "failed": 0,
        "unstable": "none",
        "packages": {},
        "exit_code": 0,
        **more,
    }


def test_rows_replace_those_of_the_same_run() -> None:
    quiet, busy, nightly = row_of("gate", "old", 1), row_of("gate", "old", 1, busy=2), row_of("nightly", "test", 2)
    new = [row_of("gate", "check", 3)]
    assert replaced([quiet, busy, nightly], new) == [busy, nightly, *new]


def test_a_run_and_its_stages_have_limits_of_time() -> None:
    rows = [
        row_of("gate", "ci-deps", 500),
        row_of("gate", "test", 361),
        row_of("gate", "smoke", 100),
        row_of("nightly", "test", 300),
        row_of("nightly", "test-web", 901),
        row_of("gate", "test", 800, busy=2),
    ]
    assert [(bar.figure, bar.found, bar.bar) for bar in limits(rows)] == [
        ("gate, all but ci-deps: seconds", 461, "<= 720"),
        ("gate, test: seconds", 361, "<= 360"),
        ("nightly, all but ci-deps: seconds", 1201, "<= 2700"),
        ("nightly, test: seconds", 300, "<= 360"),
        ("nightly, test-web: seconds", 901, "<= 900"),
        ("gate beside 2 busy processes, all but ci-deps: seconds", 800, "<= 1200"),
    ]


def test_packages_of_a_stage_have_rows_by_their_seconds() -> None:
    rows = [row_of("gate", "test", 361, packages={"web": 4.9, "dist": 5.2, "unit/data": 7.6})]
    assert [(row["stage"], row["package"], row["seconds"]) for row in package_rows(rows)] == [
        ("test", "unit/data", 8),
        ("test", "dist", 5),
    ]
    assert not {"packages", "reference_ms"} & set(stage_rows(rows)[0])


def test_newest_runs_are_kept_and_red_ones_counted() -> None:
    runs: list[Any] = []
    for number in range(23):
        red = {"failed": int(number == 20), "unstable": "tests/a.py::one" if number == 1 else "none"}
        stages = [row_of("gate", "check", 60), row_of("gate", "test", 300 + number, busy=2 * (number % 2), **red)]
        runs = list(recent_runs(runs, stages))

    assert [(run["seconds"], run["reference_ms"]) for run in runs] == [(number, 120) for number in range(303, 323)]
    assert [(bar.found, bar.is_met) for bar in bars_of_runs(runs)] == [
        (20, True),
        (10, True),
        (1, False),
        (0, True),
    ]
