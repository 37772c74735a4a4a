"""Stages of the gate and of the nightly run: order, figures, and the published table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.stages import limits_s, run_stages, summary, with_rows


class FakeMake:
    """Stands in for make: each target takes seconds on a clock of its own, and has runs of pytest and an exit code."""

    def __init__(self, targets: dict[str, tuple[float, Sequence[dict[str, Any]], int]]) -> None:
        self.now_s = 100.0
        self.made: list[str] = []
        self._targets = targets

    def __call__(self, target: str, record: Path) -> int:
        seconds, runs, code = self._targets[target]
        self.made.append(target)
        self.now_s += seconds
        if runs:
            record.write_text("".join(json.dumps(run) + "\n" for run in runs))
        return code


def run_of(passed: int, skipped: int = 0, unstable: Sequence[str] = ()) -> dict[str, Any]:
    return {"passed": passed, "skipped": skipped, "unstable": list(unstable)}


def test_target_has_its_seconds_and_the_tests_of_all_runs(tmp_path: Path) -> None:
    make = FakeMake({
        "venv": (40.2, [], 0),
        "test": (300.0, [run_of(9000, 26, ["tests/a.py::one"])], 0),
        "smoke": (60.0, [run_of(3), run_of(73, 1)], 0),
    })  # fmt: skip

    failures, rows = run_stages(["venv", "test", "smoke"], make, lambda: make.now_s, tmp_path, ends_at=["venv"])

    assert failures == {}
    assert rows == [
        {"stage": "venv", "seconds": 40, "passed": 0, "skipped": 0, "unstable": "none"},
        {"stage": "test", "seconds": 300, "passed": 9000, "skipped": 26, "unstable": "tests/a.py::one"},
        {"stage": "smoke", "seconds": 60, "passed": 76, "skipped": 1, "unstable": "none"},
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

    found, rows = run_stages(["check", "test", "smoke"], make, lambda: make.now_s, tmp_path, ends_at=ends_at)

    assert (found, make.made) == (failures, made)
    expected = [f"{target} failed with exit code {code}" for target, code in failures.items()]
    assert summary(rows, found).splitlines()[-len(failures) :] == expected


def test_rows_replace_those_of_the_same_run() -> None:
    published = [{"run": "gate", "stage": "old"}, {"run": "nightly", "stage": "test-web"}]
    new = [{"run": "gate", "stage": "check"}]
    assert with_rows(published, new) == [{"run": "nightly", "stage": "test-web"}, {"run": "gate", "stage": "check"}]


def test_a_run_and_its_stages_have_limits_of_time() -> None:
    rows = [
        {"run": "gate", "stage": "ci-deps", "seconds": 500},
        {"run": "gate", "stage": "test", "seconds": 361},
        {"run": "gate", "stage": "smoke", "seconds": 100},
        {"run": "nightly", "stage": "test", "seconds": 300},
        {"run": "nightly", "stage": "test-web", "seconds": 901},
    ]
    assert limits_s(rows) == [
        ("gate, all but ci-deps: seconds", 461, 720),
        ("gate, test: seconds", 361, 360),
        ("nightly, all but ci-deps: seconds", 1201, 2700),
        ("nightly, test: seconds", 300, 360),
        ("nightly, test-web: seconds", 901, 900),
    ]
