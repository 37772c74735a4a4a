"""The targets of CI require every part that tests need."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

SHOWN = """include Makefile
{target}: stop
.PHONY: stop
stop: ; @echo "[$${{MEGATRAIN_REQUIRE-}}]"; exit 9
"""


@pytest.mark.parametrize(
    ("target", "requirement"), [("gate", "all"), ("ci-nightly", "all"), ("test", ""), ("test-faults-pace", "")]
)
def test_only_the_targets_of_ci_require_all_parts(target: str, requirement: str) -> None:
    """A prerequisite has the variables of its target; this one prints the variable and ends make."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MEGATRAIN_", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "--no-print-directory", "--old-file=venv", "--file=-", target],
        input=SHOWN.format(target=target), cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (f"[{requirement}]\n", 2), done.stderr
