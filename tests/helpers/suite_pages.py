"""The pages of docs/benchmarks about the tests: suite.md, suite-packages.md and suite-runs.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_least, at_most
from benchmarks.result import RESULTS, Result
from benchmarks.result import publish as publish_result

Rows = Sequence[Mapping[str, Any]]

COMMAND = "make gate SUITE_ARGS=--write"
RUN_LIMITS_S = {"gate": 720, "nightly": 2700}
BUSY_RUN_LIMITS_S = {"gate": 1200}
STAGE_LIMITS_S = {"venv": 60, "check": 120, "test": 360}
NIGHTLY_STAGE_LIMIT_S = 900
NUM_RUNS = 20
"""The number of newest runs in suite-runs.md."""
LEAST_PACKAGE_S = 5
"""A package whose tests take less in a stage has no row in suite-packages.md."""

STAGE_NOTES = (
    "busy: processes that computed all the time beside the run",
    "cpu_seconds: of the processes that ended within the stage",
    "passed, skipped: tests of the first run of each pytest; repetitions are not counted",
    "unstable: tests that failed and passed when repeated (docs/adr/0062-gate.md)",
    "installing depends on the machine's caches of packages, and ci-deps does nothing where the programs are installed",
)
PACKAGE_NOTES = (
    "seconds: the sum of the durations of its tests, with fixtures; it exceeds the stage because tests run in parallel",
    f"packages with less than {LEAST_PACKAGE_S} seconds are left out",
)
RUN_NOTES = (
    "rows are added by `make gate` and `make ci-nightly` with SUITE_ARGS=--write, and by",
    f"`python3 -m tests.stages test --write test`, green or red; the newest {NUM_RUNS} are kept",
    "seconds: of `make test`; failed: tests that failed, also when repeated",
    "reference_ms: CPU time of a fixed computation before the run (benchmarks/machine.py)",
)


def publish(file: str, *, is_green: bool) -> None:
    """Write the pages from the rows in `file`.

    The page of the runs is always written, the others only for green runs of `make gate` and `make ci-nightly`.
    """
    rows = json.loads(Path(file).read_text())
    runs = recent_runs(_published("suite-runs"), rows)
    results = [Result("suite-runs", "The last runs of the tests", COMMAND, runs, RUN_NOTES, bars_of_runs(runs))]
    if is_green and rows[0]["run"] in RUN_LIMITS_S:
        stages = replaced(_published("suite"), stage_rows(rows))
        packages = replaced(_published("suite-packages"), package_rows(rows))
        results += [
            Result("suite", "How long the tests take", COMMAND, stages, STAGE_NOTES, limits(stages)),
            Result("suite-packages", "Which tests take the time", COMMAND, packages, PACKAGE_NOTES, ()),
        ]
    for result in results:
        publish_result(result, is_written=True)


def stage_rows(rows: Rows) -> list[dict[str, Any]]:
    """Return a row for each stage, without its packages."""
    left_out = ("reference_ms", "packages", "failed", "exit_code")
    return [{key: value for key, value in row.items() if key not in left_out} for row in rows]


def package_rows(rows: Rows) -> list[dict[str, Any]]:
    """Return a row for each package of each stage, the slowest first."""
    found = []
    for row in rows:
        about = {key: row[key] for key in ("run", "date", "commit", "busy", "stage")}
        by_seconds = sorted(row["packages"].items(), key=lambda item: -item[1])
        found += [{**about, "package": name, "seconds": round(s)} for name, s in by_seconds if s >= LEAST_PACKAGE_S]
    return found


def recent_runs(published: Rows, rows: Rows) -> list[Mapping[str, Any]]:
    """Return the newest runs of `make test`, with that of `rows` last."""
    keys = ("run", "date", "commit", "busy", "reference_ms", "seconds", "passed", "failed", "unstable")
    new = [{key: row[key] for key in keys} for row in rows if row["stage"] == "test"]
    return [*published, *new][-NUM_RUNS:]


def bars_of_runs(runs: Rows) -> list[Bar]:
    """Return the limits for ten runs, five of them beside busy processes: none red, at most one unstable test."""
    return [
        at_least("runs", len(runs), 10),
        at_least("runs beside two busy processes", sum(row["busy"] >= 2 for row in runs), 5),
        at_most("runs with failed tests", sum(row["failed"] > 0 for row in runs), 0),
        at_most("runs with unstable tests", sum(row["unstable"] != "none" for row in runs), 1),
    ]


def replaced(published: Rows, rows: Rows) -> list[Mapping[str, Any]]:
    """Return the published rows, with `rows` in place of those of the same run beside the same number of busy
    processes."""
    kinds = {(row["run"], row["busy"]) for row in rows}
    return [*(row for row in published if (row["run"], row["busy"]) not in kinds), *rows]


def limits(rows: Rows) -> list[Bar]:
    """Return the limits of the runs and their stages: the longest time in seconds on 2 cores."""
    bars: list[Bar] = []
    for run, busy in dict.fromkeys((row["run"], row["busy"]) for row in rows):
        stages = [row for row in rows if (row["run"], row["busy"]) == (run, busy) and row["stage"] != "ci-deps"]
        limits_s = BUSY_RUN_LIMITS_S if busy else RUN_LIMITS_S
        name = f"{run} beside {busy} busy processes" if busy else run
        if run in limits_s:
            sum_s = sum(row["seconds"] for row in stages)
            bars.append(at_most(f"{name}, all but ci-deps: seconds", sum_s, limits_s[run]))
        for row in () if busy else stages:
            limit_s = STAGE_LIMITS_S.get(row["stage"], NIGHTLY_STAGE_LIMIT_S if run == "nightly" else None)
            if limit_s is not None:
                bars.append(at_most(f"{name}, {row['stage']}: seconds", row["seconds"], limit_s))
    return bars


def _published(name: str) -> Rows:
    file = RESULTS / f"{name}.json"
    rows: Rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return rows
