"""The failures that are followed by a restart, and the limit on restarts."""

from __future__ import annotations

import signal

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.programs.restart_limit import NOT_STARTED, RepeatedFailures, max_starts

MAX_STARTS: dict[int, int | None] = {
    ExitCode.USAGE: 2,
    ExitCode.DATA: 2,
    ExitCode.NOT_FOUND: 2,
    ExitCode.NO_PERMISSION: 2,
    ExitCode.CONFIG: 2,
    ExitCode.FAILURE: 10,
    ExitCode.CHECKPOINT: 10,
    ExitCode.NON_FINITE: 10,
    ExitCode.COMMUNICATION: 10,
    ExitCode.UNREACHABLE: 10,
    ExitCode.REFUSED: 10,
    ExitCode.SAVED_AND_STOPPED: 10,
    -signal.SIGSEGV: 10,
    -signal.SIGKILL: 10,
    -signal.SIGTERM: 10,
    255: 10,
    ExitCode.SAVE_FAILED: 720,
    NOT_STARTED: 720,
    ExitCode.COORDINATION: None,
}


def test_every_exit_code_has_a_limit_but_an_outage_of_etcd() -> None:
    assert set(MAX_STARTS) >= set(ExitCode) - {ExitCode.OK}
    assert {code: max_starts(code) for code in MAX_STARTS} == MAX_STARTS


@pytest.mark.parametrize("code", [ExitCode.SAVE_FAILED, ExitCode.CONFIG, -signal.SIGSEGV, ExitCode.COORDINATION])
def test_the_last_of_equal_failures_reaches_the_limit(code: int) -> None:
    limit, failures = max_starts(code), RepeatedFailures()
    ends = [failures.count(code, f"process {number}: no space left") for number in range(limit or 2000)]
    assert ends == [False] * (len(ends) - 1) + [limit is not None]
    assert failures.number == len(ends)


def test_another_error_or_a_successful_start_resets_the_count() -> None:
    failures = RepeatedFailures()
    for code, error, number in [(74, "a", 1), (74, "b", 1), (74, "b", 2), (1, "b", 1), (-11, "c", 1), (-11, "d", 2)]:
        failures.count(code, error)
        assert failures.number == number, (code, error)
    failures.forget()
    assert not failures.count(-11, "d")
    assert failures.number == 1
    assert [failures.count(0, "") or failures.number for _ in range(3)] == [1, 1, 1], "exit code 0 is not a failure"
