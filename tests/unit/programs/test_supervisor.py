"""A supervised program: started again when it ends, and left alone if another start cannot help."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.programs import supervisor
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.supervisor import Supervisor, WorkAtEnd

# programs of the shell, whose argument is $1: Python takes a tenth of a second to start
FAILS = 'echo "error: $$ cannot open the door"; exit "$1"'


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_POLL_S", 0.01)
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.001)


def supervised(log: Path, program: str, argument: object, max_reports: int) -> tuple[Supervisor, list[str]]:
    """Run a program of the shell until it is not started again, or has ended this often; return the reports."""
    reports: list[str] = []
    closed = threading.Event()

    def start(log: Path) -> ChildProcess:
        return ChildProcess(["sh", "-c", program, "sh", str(argument)], log=log)

    def report(text: str) -> None:
        reports.append(text)
        if len(reports) == max_reports:
            closed.set()

    found = Supervisor("diagnostics", start, log, report)
    found.run(closed)
    return found, reports


@pytest.mark.slow(kept=["78-2-ended with exit code 78 (config)"])
@pytest.mark.parametrize(
    ("code", "num_lives", "ended"),
    [
        (ExitCode.CONFIG, 2, "ended with exit code 78 (config)"),
        (ExitCode.USAGE, 2, "ended with exit code 2 (usage)"),
        (ExitCode.FAILURE, 10, "ended with exit code 1"),
        (ExitCode.CHECKPOINT, 10, "ended with exit code 66 (checkpoint)"),
    ],
)
def test_repeated_error_is_reported_and_ends_the_restarts(
    tmp_path: Path, code: ExitCode, num_lives: int, ended: str
) -> None:
    log = tmp_path / "logs" / "diagnostics.log"
    found, reports = supervised(log, FAILS, int(code), num_lives + 1)
    assert len(log.read_text().splitlines()) == num_lives == len(reports)
    assert reports[0] == f"diagnostics {ended}; it is started again in 0 s; see {log}"
    assert f"diagnostics has failed 2 times with the same error: it {ended}: error: " in reports[1]
    assert "cannot open the door" in reports[1]
    assert reports[-1].endswith(f"it is not started again: fix the cause, then launch the job again; see {log}")
    assert f"failed {num_lives} times with the same error: it {ended}; error: " in found.problem


CRASHES = 'echo "$(wc -l < "$1" | tr 0-9 a-j)"; kill -SEGV $$'


@pytest.mark.slow
def test_signal_each_time_ends_the_restarts(tmp_path: Path) -> None:
    """For any earlier output of the program."""
    log = tmp_path / "diagnostics.log"
    found, reports = supervised(log, CRASHES, log, 11)
    assert len(log.read_text().splitlines()) == 10 == len(reports)
    assert (
        "diagnostics has failed 10 times with the same error: it was killed by SIGSEGV (11); it is not started again"
        in reports[-1]
    )
    assert "failed 10 times with the same error" in found.problem


OTHERS = 'echo "$(wc -l < "$1" | tr 0-9 a-j)"; exit 78'


@pytest.mark.parametrize(("program", "argument"), [(FAILS, int(ExitCode.COORDINATION)), (OTHERS, "diagnostics.log")])
def test_program_is_restarted_where_a_restart_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, argument: object
) -> None:
    """After exit code 68 (etcd cannot be reached) each time, and while it ends with another error each time."""
    monkeypatch.chdir(tmp_path)
    _, reports = supervised(tmp_path / "diagnostics.log", program, argument, 7)
    assert len(reports) == 7
    # the pauses double from a millisecond on, so all of them are shown as 0 s
    assert all("it is started again in 0 s" in text for text in reports)


def test_a_problem_ends_with_the_next_other_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "diagnostics.log"
    twice = 'if [ "$(wc -l < "$1")" -lt 2 ]; then echo a; else echo b; fi; exit 68'
    found, _ = supervised(log, twice, log.name, 2)
    assert "failed 2 times with the same error" in found.problem
    log.unlink()
    found, _ = supervised(log, twice, log.name, 3)
    assert found.problem == ""


@pytest.mark.slow
def test_exits_that_the_work_explains_are_no_failures(tmp_path: Path) -> None:
    """Nine failures after two of them, and then one more of them: only the next ten failures in a row are too many."""
    reports: list[str] = []
    work = WorkAtEnd("a picture", 1, is_last=False)
    works = iter([work] * 2 + [None] * 9 + [work])

    def start(log: Path) -> ChildProcess:
        return ChildProcess(["sh", "-c", "kill -SEGV $$"], log=log)

    found = Supervisor("producer", start, tmp_path / "log", reports.append, lambda *end: next(works, None))
    found.run(threading.Event())
    text = f"producer was killed by SIGSEGV (11) at a picture; it is started again; see {tmp_path / 'log'}"
    assert [number for number, report in enumerate(reports) if report == text] == [0, 1, 11]
    assert len(reports) == 22
    assert "has failed 10 times with the same error: it was killed by SIGSEGV (11)" in found.problem


def test_last_end_at_work_ends_the_restarts(tmp_path: Path) -> None:
    reports: list[str] = []
    ends: list[tuple[int, str]] = []
    problems: list[str] = []

    def start(log: Path) -> ChildProcess:
        problems.append(found.problem)
        return ChildProcess(["sh", "-c", "echo cannot decode; kill -SEGV $$"], log=log)

    def work_at(code: int, ended: str) -> WorkAtEnd:
        ends.append((code, ended))
        return WorkAtEnd("a picture", len(ends), is_last=len(ends) == 3)

    log = tmp_path / "log"
    found = Supervisor("producer", start, log, reports.append, work_at)
    found.run(threading.Event())
    assert ends == [(-11, "was killed by SIGSEGV (11)")] * 3
    assert problems == ["", *[f"producer was killed by SIGSEGV (11) at a picture; see {log}"] * 2]
    summary = "producer has ended 3 times without a result: it was killed by SIGSEGV (11) at a picture"
    assert len(reports) == 3
    assert reports[-1].startswith(f"{summary}: cannot decode; it is not started again: fix the cause")
    assert found.problem == f"{summary}; cannot decode; see {log}"
