"""The end of `megatrain train` on unexpected errors: with a message, at once, even while threads of torch still run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

_PROGRAM = """
import sys, threading, types
from megatrain.worker_program import run_worker_program
if {has_torch}:
    sys.modules["torch"] = types.ModuleType("torch")  # whether it is loaded is all that is asked
    threading.Thread(target=threading.Event().wait).start()  # the interpreter's own end would wait for it
def fail():
    print("a last message", end="")
    {statement}
sys.exit(run_worker_program(fail))
"""


def end_of(statement: str, *, has_torch: bool = True) -> tuple[int, str, str]:
    program = _PROGRAM.format(statement=statement, has_torch=has_torch)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow(kept=["True"])
@pytest.mark.parametrize("has_torch", [True, False])
def test_unexpected_error_ends_with_a_traceback_and_code_1(has_torch: bool) -> None:
    code, output, errors = end_of("raise RuntimeError('an unforeseen error')", has_torch=has_torch)
    assert code == 1
    assert output == "a last message"
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.endswith("RuntimeError: an unforeseen error\n")


@pytest.mark.slow(kept=["sys.exit(7)-7-"])
@pytest.mark.parametrize(
    ("statement", "code", "errors"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no more')", 1, "no more\n"),
        ("raise KeyboardInterrupt", 130, "megatrain: interrupted\n"),
        ("from megatrain.contracts.errors import DataError; raise DataError('no file')", 65,
         "megatrain: error: no file\n"),
    ],
)  # fmt: skip
def test_the_exit_code_is_what_it_would_have_been(statement: str, code: int, errors: str) -> None:
    assert end_of(statement) == (code, "a last message", errors)
