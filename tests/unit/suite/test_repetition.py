"""Repetition of failures: which are repeated, how often, and the last lines of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers.run_record import FailedTest, SampleRun, read_record
from tests.helpers.source_tree import ROOT
from tests.run import main

DEADLINE = FailedTest("tests/a.py::deadline", is_deadline=True, report="waited 60 s for the end")
VALUE = FailedTest("tests/a.py::value", is_deadline=False, report="assert 1 == 2")
OTHER = FailedTest("tests/a.py::other", is_deadline=False, report="assert 3 == 4")
MORE = FailedTest("tests/a.py::more", is_deadline=True, report="waited 60 s for a file")

SESSION = """
import os
import threading
import pytest
from tests.helpers.waiting import DeadlineError

def test_passes():
    pass

def test_skips():
    pytest.skip("nothing to test")

def test_wrong_value():
    assert 1 == 2

def test_deadline():
    raise DeadlineError("waited 60 s for the end")

def test_error_that_follows_from_a_deadline():
    try:
        raise DeadlineError("waited 60 s for the end")
    except DeadlineError as error:
        raise AssertionError("left behind") from error

@pytest.fixture
def server():
    raise DeadlineError("waited 60 s for the server")

def test_fixture(server):
    pass

@pytest.mark.timeout(0.1)
def test_hangs():
    threading.Event().wait()

def test_loses_its_process():
    os._exit(3)
"""
CONFTEST = """
from pathlib import Path
from tests.helpers.run_record import RunRecorder

def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(RunRecorder(None if is_worker else Path(__file__).parent / "record.json"))
"""


class FakePytest:
    """Replaces pytest: the first run has these failures; each later run takes the next exit code."""

    def __init__(self, code: int, failed: Sequence[FailedTest], codes: Sequence[int]) -> None:
        self.calls: list[list[str]] = []
        self._code, self._failed, self._codes = code, failed, list(codes)

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(list(arguments))
        for argument in arguments:
            if argument.startswith("--record="):
                Path(argument.partition("=")[2]).write_text(
                    json.dumps(asdict(SampleRun(7, 2, tuple(self._failed), {"dist": 9.5})))
                )
                return self._code
        return self._codes.pop(0)


@pytest.mark.parametrize(
    ("code", "failed", "codes", "result", "repeated"),
    [
        pytest.param(0, [], [], 0, [], id="all-pass"),
        pytest.param(1, [DEADLINE], [0], 0, [DEADLINE], id="a-deadline-is-green-once"),
        pytest.param(1, [DEADLINE], [1], 1, [DEADLINE], id="a-deadline-is-red-again"),
        pytest.param(1, [VALUE], [0] * 5, 0, [VALUE] * 5, id="a-value-is-green-five-times"),
        pytest.param(1, [VALUE], [0, 0, 0, 0, 1], 1, [VALUE] * 5, id="a-value-is-red-the-fifth-time"),
        pytest.param(1, [DEADLINE, VALUE], [0] * 6, 0, [DEADLINE] + [VALUE] * 5, id="each-by-its-kind"),
        pytest.param(1, [DEADLINE, VALUE], [0, 1], 1, [DEADLINE, VALUE], id="one-of-two-is-red-again"),
        pytest.param(1, [DEADLINE, VALUE, OTHER, MORE], [], 1, [], id="four-are-not-repeated"),
        pytest.param(1, [], [], 1, [], id="red-without-a-failed-test"),
        pytest.param(2, [DEADLINE], [], 2, [], id="a-collection-error"),
        pytest.param(3, [DEADLINE], [], 3, [], id="an-internal-error"),
        pytest.param(5, [], [], 5, [], id="no-test-selected"),
    ],
)
def test_repeated_failures(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    failed: list[FailedTest],
    codes: list[int],
    result: int,
    repeated: list[FailedTest],
) -> None:
    session = FakePytest(code, failed, codes)

    totals = tmp_path / "totals"
    arguments = ["--kernels=emulated", "--", "tests", "-n", "auto"]

    assert main(arguments, session, tmp_path / "record", totals) == result

    assert session.calls[0][0] == "--kernels=emulated"
    assert session.calls[0][2:] == ["tests", "-n", "auto"]
    assert session.calls[1:] == [["--kernels=emulated", one.nodeid] for one in repeated]
    unstable = [one.nodeid for one in failed]
    of_end = {"failed": len(failed), "unstable": []} if result else {"failed": 0, "unstable": unstable}
    assert json.loads(totals.read_text()) == {"passed": 7, "skipped": 2, "seconds": {"dist": 9.5}, **of_end}
    printed = capsys.readouterr().out
    for one in failed:
        assert (f"UNSTABLE {one.nodeid}" in printed) is (result == 0)
        assert (one.report in printed) is (result == 0)


@pytest.mark.slow
def test_each_kind_of_failure_is_recorded_from_every_process(tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(SESSION)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "xdist.plugin", "-p", "pytest_timeout", "-n", "2"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stdout + done.stderr
    record = read_record(tmp_path / "record.json")
    assert (record.passed, record.skipped) == (1, 1)
    assert list(record.seconds) == ["."]
    assert record.seconds["."] > 0
    failed = {one.nodeid.partition("::")[2]: one for one in record.failed}
    assert {name: one.is_deadline for name, one in failed.items()} == {
        "test_wrong_value": False,
        "test_deadline": True,
        "test_error_that_follows_from_a_deadline": True,
        "test_fixture": True,
        "test_hangs": True,
        "test_loses_its_process": True,
    }
    assert "assert 1 == 2" in failed["test_wrong_value"].report
    assert "crashed while running" in failed["test_loses_its_process"].report
    assert "test_loses_its_process" in failed["test_loses_its_process"].report
