"""The notebooks run from the first cell to the last, and are stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_documents import copy_repository, run_fork
from tests.helpers.source_tree import ROOT, relative

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_cells_run_in_order(path: Path, tmp_path: Path) -> None:
    copy_repository(tmp_path)
    # One program, because a cell uses the names of the cells before it.
    program = "\n\n".join("".join(cell["source"]) for cell in cells(path, "code"))
    run_fork(["-c", program], tmp_path, relative(path), program)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_no_output_is_kept(path: Path) -> None:
    assert cells(path, "markdown")
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
