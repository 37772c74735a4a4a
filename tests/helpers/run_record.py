"""The record of a run of pytest: the numbers of tests, and the failed ones, so that they can be repeated."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import DeadlineError

_TIMEOUT_OF_PYTEST = "from pytest-timeout"


@dataclass(frozen=True, slots=True)
class FailedTest:
    """A failed test: its node id, whether it exceeded a deadline, and the first traceback."""

    nodeid: str
    is_deadline: bool
    report: str


@dataclass(frozen=True, slots=True)
class SampleRun:
    """The tests of one run of pytest.

    seconds: of the tests of each package (`unit/launcher`), with their fixtures. Tests run in parallel, so the sum may
    exceed the run.
    """

    passed: int = 0
    skipped: int = 0
    failed: tuple[FailedTest, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


class RunRecorder:
    """A pytest plugin. It writes the record of the session, of all its processes, to one file.

    Failures by deadline are: our DeadlineError, pytest's own timeout, or a lost worker process. All other failures,
    such as a wrong value, are not by deadline. An error in a fixture counts as a failure of the test.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._passed = self._skipped = 0
        self._failed: dict[str, FailedTest] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.excinfo is not None:
            # xdist transfers plain attributes of a report from its worker processes to the printing process.
            report.is_deadline = is_deadline(call.excinfo.value)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed += report.passed and report.when == "call"
        self._skipped += report.skipped
        self._seconds[_package(report.nodeid)] += report.duration
        if report.failed:
            # xdist creates a separate report, of the phase "???", for the test that a lost process ran.
            is_lost = report.when not in ("setup", "call", "teardown")
            failed = FailedTest(report.nodeid, is_lost or getattr(report, "is_deadline", False), report.longreprtext)
            before = self._failed.setdefault(report.nodeid, failed)
            if before.is_deadline and not failed.is_deadline:
                self._failed[report.nodeid] = failed

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            record = SampleRun(self._passed, self._skipped, tuple(self._failed.values()), dict(self._seconds))
            self._path.write_text(json.dumps(asdict(record)))


def _package(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parent.as_posix().removeprefix("tests/")


def is_deadline(error: BaseException) -> bool:
    """Return whether this error, or its cause, shows that a deadline passed."""
    causes: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return any(
        isinstance(cause, DeadlineError)
        or (isinstance(cause, pytest.fail.Exception) and _TIMEOUT_OF_PYTEST in str(cause))
        for cause in causes
    )


def read_record(path: Path) -> SampleRun:
    """Return the record of a run, with failures in the order of their reports; empty if there is none."""
    if not path.exists():
        return SampleRun()
    record = json.loads(path.read_text())
    return SampleRun(
        record["passed"], record["skipped"], tuple(FailedTest(**one) for one in record["failed"]), record["seconds"]
    )
