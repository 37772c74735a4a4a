"""`python3 -m tests.stages RUN [OPTIONS] TARGET...`: make these targets in order, and print the duration of each.

It ends at the first target that fails, with its exit code; with --keep-going, only if that is a preparation (ci-deps,
venv). With --busy, N processes compute all the time beside it. With --write, the figures go to docs/benchmarks:
seconds, tests and UNSTABLE tests of each target to suite.md and the seconds of each package to suite-packages.md, if
all targets of a gate or nightly run passed, and in any case one row for the target `test` to suite-runs.md. It starts
with the machine's own Python, because one of the targets may install everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from select import select
from typing import Any

from benchmarks.machine import reference_ms
from megatrain.programs.processes import adopt_orphans, children

ROOT = Path(__file__).resolve().parents[1]
RECORD_VARIABLE = "MEGATRAIN_SUITE_RECORD"
"""Names the file to which `tests.run` appends a line of JSON for each run of pytest: see `tests.run.main`."""
PREPARATIONS = ("ci-deps", "venv")
_ORPHANS_END_S = 10.0
"""Fork servers of tests end when they notice that their test process has ended."""
_COMPUTE_ALWAYS = """
import sys
from megatrain.programs.processes import install_parent_death_guard
install_parent_death_guard(int(sys.argv[1]))
while True:
    pass
"""
Make = Callable[[str, Path], int]
Clocks = Callable[[], tuple[float, float]]
"""Returns the time of a clock, and the CPU time of all child processes that ended; both in seconds."""


def main(arguments: Sequence[str]) -> int:
    """Run the targets and return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.stages", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    speed_ms = reference_ms()
    with tempfile.TemporaryDirectory(prefix="megatrain-stages-") as directory:
        ends_at = PREPARATIONS if args.keep_going else args.targets
        with busy_processes(args.busy):
            failures, rows = run_stages(args.targets, make_target, clocks_s, Path(directory), ends_at=ends_at)
        print(summary(rows, failures), flush=True)
        code = next(iter(failures.values()), 0)
        if not args.write:
            return code
        about: dict[str, Any] = {"run": args.run, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": _commit()}
        about["reference_ms"] = speed_ms
        file = Path(directory) / "rows.json"
        file.write_text(json.dumps([{**about, "busy": args.busy, **row} for row in rows]))
        # with the installed environment: the pages name the version of torch
        program = f"from tests.helpers.suite_pages import publish; publish({str(file)!r}, is_green={not code})"
        done = subprocess.run([ROOT / ".venv" / "bin" / "python", "-c", program], cwd=ROOT, check=False)
        return code or done.returncode


def run_stages(
    targets: Sequence[str], make: Make, clocks_s: Clocks, directory: Path, *, ends_at: Collection[str]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Make the targets until one of `ends_at` fails.

    Returns the exit codes of the targets that failed, and a row for each target that was made: its seconds, the CPU
    seconds of its processes, its tests, and the seconds of its tests by package.
    """
    rows: list[dict[str, Any]] = []
    failures: dict[str, int] = {}
    for number, target in enumerate(targets):
        record = directory / f"{number}.jsonl"
        begin_s, begin_cpu_s = clocks_s()
        code = make(target, record)
        end_s, end_cpu_s = clocks_s()
        times = {"seconds": round(end_s - begin_s), "cpu_seconds": round(end_cpu_s - begin_cpu_s)}
        rows.append({"stage": target, **times, **_counts(record), "exit_code": code})
        if code:
            failures[target] = code
            if target in ends_at:
                break
    return failures, rows


def _counts(record: Path) -> dict[str, Any]:
    runs = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    packages: dict[str, float] = {}
    for run in runs:
        for package, seconds in run["seconds"].items():
            packages[package] = packages.get(package, 0.0) + seconds
    unstable = [name for run in runs for name in run["unstable"]]
    return {
        **{kind: sum(run[kind] for run in runs) for kind in ("passed", "skipped", "failed")},
        "unstable": ", ".join(unstable) or "none",
        "packages": packages,
    }


def summary(rows: Sequence[Mapping[str, Any]], failures: Mapping[str, int]) -> str:
    """Return the last lines of a run: the seconds of each target, its sum, the unstable tests, and what failed."""
    lines = [f"{row['stage']:<20} {row['seconds']:>6} s  {row['passed']:>6} passed" for row in rows]
    lines.append(f"{'all':<20} {sum(row['seconds'] for row in rows):>6} s")
    lines += [f"UNSTABLE in {row['stage']}: {row['unstable']}" for row in rows if row["unstable"] != "none"]
    lines += [f"{target} failed with exit code {code}" for target, code in failures.items()]
    return "\n".join(lines)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run processes that compute all the time. They end with this process, even if it is killed."""
    command = [sys.executable, "-c", _COMPUTE_ALWAYS, str(os.getpid())]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def clocks_s() -> tuple[float, float]:
    """Return the time of a clock, and the CPU time of the children of this process that ended; both in seconds."""
    times = os.times()
    return time.monotonic(), times.children_user + times.children_system


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def make_target(target: str, record: Path) -> int:
    """Make a target and return its exit code. Its tests write their record to that file.

    Its orphans become children of this process, which waits for them: the fork servers of the tests, and so the ranks
    that they forked. Otherwise their CPU time would not be counted.
    """
    adopt_orphans()
    environment = {**os.environ, RECORD_VARIABLE: str(record)}
    others = set(children())
    process = subprocess.Popen(["make", "--no-print-directory", target], cwd=ROOT, env=environment)
    ended, status = 0, 0
    while ended != process.pid:
        ended, status = os.waitpid(-1, 0)  # also an orphan: tests expect that it is reaped at once
    process.returncode = os.waitstatus_to_exitcode(status)
    _wait_for_orphans(others)
    return process.returncode


def _wait_for_orphans(others: Collection[int]) -> None:
    """Wait for the children of this process that are not in `others`. Those that do not end soon are left running."""
    end_s = time.monotonic() + _ORPHANS_END_S
    while (orphans := set(children()).difference(others)) and (left_s := end_s - time.monotonic()) > 0:
        pid = min(orphans)
        descriptor = os.pidfd_open(pid)
        try:
            has_ended, _, _ = select([descriptor], [], [], left_s)
        finally:
            os.close(descriptor)
        if has_ended:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
