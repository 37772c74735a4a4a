"""`python3 -m tests.stages RUN [--keep-going] [--write] TARGET...`: make these targets in order, and say how long each
took.

It ends at the first target that fails, with its exit code; with --keep-going, only if that is a preparation (ci-deps,
venv). With --write, if all targets passed, a table of seconds, numbers of tests and UNSTABLE tests goes to
docs/benchmarks/suite.md. RUN (gate, nightly) names its rows,
which replace the earlier ones of that name. It starts with the machine's own Python, because one of the targets may be
the one that installs everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD_VARIABLE = "MEGATRAIN_SUITE_RECORD"
"""Names the file to which `tests.run` appends a line of JSON for each run: passed, skipped, unstable."""
FIGURES = ROOT / "docs" / "benchmarks" / "suite.json"
TITLE = "How long the tests take"
NOTES = (
    "passed, skipped: tests of the first run of each pytest; repetitions are not counted",
    "unstable: tests that failed and passed when repeated (docs/adr/0062-gate.md)",
    "installing depends on the machine's caches of packages, and ci-deps does nothing where the programs are installed",
)

PREPARATIONS = ("ci-deps", "venv")
RUN_LIMITS_S = {"gate": 720, "nightly": 2700}
STAGE_LIMITS_S = {"venv": 60, "check": 120, "test": 360}
NIGHTLY_STAGE_LIMIT_S = 900

Make = Callable[[str, Path], int]


def main(arguments: Sequence[str]) -> int:
    """Run the targets and return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.stages", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megatrain-stages-") as directory:
        ends_at = PREPARATIONS if args.keep_going else args.targets
        failures, rows = run_stages(args.targets, _make, time.monotonic, Path(directory), ends_at=ends_at)
        print(summary(rows, failures), flush=True)
        code = next(iter(failures.values()), 0)
        if code or not args.write:
            return code
        about = {"run": args.run, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": _commit()}
        file = Path(directory) / "rows.json"
        file.write_text(json.dumps(with_rows(_published_rows(), [{**about, **row} for row in rows])))
        # with the environment that was installed: the page names the version of torch
        program = f"from tests.stages import publish_rows; publish_rows({str(file)!r})"
        return subprocess.run([ROOT / ".venv" / "bin" / "python", "-c", program], cwd=ROOT, check=False).returncode


def run_stages(
    targets: Sequence[str], make: Make, clock_s: Callable[[], float], directory: Path, *, ends_at: Collection[str]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Make the targets until one of `ends_at` fails.

    Returns the exit codes of the targets that failed, and a row for each target that was made.
    """
    rows: list[dict[str, Any]] = []
    failures: dict[str, int] = {}
    for number, target in enumerate(targets):
        record = directory / f"{number}.jsonl"
        begin_s = clock_s()
        code = make(target, record)
        rows.append({"stage": target, "seconds": round(clock_s() - begin_s), **_counts(record)})
        if code:
            failures[target] = code
            if target in ends_at:
                break
    return failures, rows


def _counts(record: Path) -> dict[str, Any]:
    runs = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    unstable = [name for run in runs for name in run["unstable"]]
    return {
        "passed": sum(run["passed"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
        "unstable": ", ".join(unstable) or "none",
    }


def summary(rows: Sequence[Mapping[str, Any]], failures: Mapping[str, int]) -> str:
    """Return the last lines of a run: the seconds of each target, its sum, the unstable tests, and what failed."""
    lines = [f"{row['stage']:<20} {row['seconds']:>6} s  {row['passed']:>6} passed" for row in rows]
    lines.append(f"{'all':<20} {sum(row['seconds'] for row in rows):>6} s")
    lines += [f"UNSTABLE in {row['stage']}: {row['unstable']}" for row in rows if row["unstable"] != "none"]
    lines += [f"{target} failed with exit code {code}" for target, code in failures.items()]
    return "\n".join(lines)


def with_rows(published: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the published rows, where `rows` replace those of the same run."""
    names = {row["run"] for row in rows}
    return [*(row for row in published if row["run"] not in names), *rows]


def limits_s(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Return what has a limit of time: its name, its seconds, and the most that 2 quiet cores may take."""
    found: list[tuple[str, float, float]] = []
    for run, most_s in RUN_LIMITS_S.items():
        stages = [row for row in rows if row["run"] == run and row["stage"] != "ci-deps"]
        if stages:
            found.append((f"{run}, all but ci-deps: seconds", sum(row["seconds"] for row in stages), most_s))
        known = [row for row in stages if row["stage"] in STAGE_LIMITS_S or run == "nightly"]
        found += [
            (f"{run}, {row['stage']}: seconds", row["seconds"], STAGE_LIMITS_S.get(row["stage"], NIGHTLY_STAGE_LIMIT_S))
            for row in known
        ]
    return found


def publish_rows(file: str) -> None:
    """Write docs/benchmarks/suite.md and .json from the rows in `file`."""
    from benchmarks.bars import at_most
    from benchmarks.result import Result, publish

    rows = json.loads(Path(file).read_text())
    bars = [at_most(*one) for one in limits_s(rows)]
    publish(Result("suite", TITLE, "make gate SUITE_ARGS=--write", rows, NOTES, bars), is_written=True)


def _published_rows() -> list[dict[str, Any]]:
    return json.loads(FIGURES.read_text())["rows"] if FIGURES.exists() else []


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _make(target: str, record: Path) -> int:
    environment = {**os.environ, RECORD_VARIABLE: str(record)}
    return subprocess.run(["make", "--no-print-directory", target], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
