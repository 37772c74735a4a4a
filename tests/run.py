"""`python -m tests.run OPTIONS -- SELECTION`: run pytest, and repeat a few failures to distinguish faults from chance.

OPTIONS apply to every run; SELECTION (files, -k, -n) only for the first, which runs all of it. A failure is repeated
only if that run ended with exit code 1 and at most three tests failed. A test that failed by a deadline must pass once,
any other must pass five times in a row. A test that failed and then passed is UNSTABLE: the exit code is 0, the first
traceback is printed again, and the last lines name the test. Collection errors and all other exit codes end the command
at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers.run_record import FailedTest, read_record
from tests.stages import RECORD_VARIABLE

MAX_REPEATED = 3
GREEN_AFTER_DEADLINE = 1
GREEN_AFTER_OTHER = 5
_FAILED = 1

Pytest = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str], pytest: Pytest, record: Path, totals: Path | None = None) -> int:
    """Run pytest with these arguments, and repeat failed tests. Returns the exit code.

    record: the file for the record of the first run. totals: a file to which one line of JSON is appended: of the first
    run the numbers of tests that passed and were skipped, and the seconds of each package; the number of tests that
    failed, and the names of unstable ones, which failed and then passed.
    """
    options, selection = split_arguments(arguments)
    code = pytest([*options, f"--record={record}", *selection])
    first = read_record(record)
    if code == _FAILED and first.failed and _pass_when_repeated(first.failed, options, pytest):
        code = 0
    if totals is not None:
        counts = {"passed": first.passed, "skipped": first.skipped, "failed": len(first.failed) if code else 0}
        unstable = [] if code else [one.nodeid for one in first.failed]
        with totals.open("a") as file:
            print(json.dumps({**counts, "unstable": unstable, "seconds": first.seconds}), file=file)
    return code


def _pass_when_repeated(failed: Sequence[FailedTest], options: Sequence[str], pytest: Pytest) -> bool:
    if len(failed) > MAX_REPEATED:
        _print(f"{len(failed)} tests failed, so none is repeated (at most {MAX_REPEATED})")
        return False
    for one in failed:
        times = GREEN_AFTER_DEADLINE if one.is_deadline else GREEN_AFTER_OTHER
        for number in range(1, times + 1):
            reason = "a deadline passed" if one.is_deadline else "not by a deadline"
            _print(f"repetition {number} of {times}: {one.nodeid} (failed: {reason})")
            if pytest([*options, one.nodeid]):
                _print(f"FAILED again: {one.nodeid}")
                return False
    _print_unstable(failed)
    return True


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of every run and the selection of the first; without `--` all arguments are the selection."""
    if "--" not in arguments:
        return [], list(arguments)
    at = arguments.index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _print_unstable(failed: Sequence[FailedTest]) -> None:
    for one in failed:
        _print(f"first failure of {one.nodeid}:\n{one.report}")
    for one in failed:
        _print(f"UNSTABLE {one.nodeid}")
    _print(f"{len(failed)} unstable: failed, and passed when repeated; repair the test or the product")


def _print(text: str) -> None:
    print(f"tests.run: {text}", flush=True)


def _run_pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="megatrain-tests-") as directory:
        totals = os.environ.pop(RECORD_VARIABLE, "")
        record = Path(directory) / "record.json"
        sys.exit(main(sys.argv[1:], _run_pytest, record, Path(totals) if totals else None))
