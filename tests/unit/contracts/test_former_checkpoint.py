"""Checkpoints and black boxes that were written when a round was called an incarnation are read as ever.

tests/golden/former-names was written by the last program that called it so, and is never written anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.black_box import read_black_box
from megatrain.contracts.checkpoint_files import (
    check_writable,
    commit_problem,
    committed_steps,
    is_committed,
    read_manifest,
    wrong_files,
)
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import LocalLocation, Location
from megatrain.contracts.manifest import Manifest
from tests.helpers.checkpoint_tree import make_manifest, manifest_path, path_of, put_checkpoint
from tests.helpers.source_tree import ROOT

FORMER = ROOT / "tests" / "golden" / "former-names"
ROUND = 3


@pytest.fixture
def former(tmp_path: Path) -> Location:
    """Return a checkpoint of step 120, committed by round 3."""
    shutil.copytree(FORMER / "checkpoints" / "main", tmp_path / "main")
    return LocalLocation(tmp_path / "main" / "step-000000120")


def test_a_former_checkpoint_is_complete_and_has_its_round(former: Location) -> None:
    manifest = read_manifest(former, job="demo", branch="main")
    assert (manifest.step, manifest.round) == (120, ROUND)
    assert is_committed(former)
    assert (commit_problem(former), wrong_files(former, manifest)) == (None, [])
    assert committed_steps(LocalLocation(path_of(former).parent)) == [120]


def test_a_former_commit_holds_an_older_round_off(former: Location) -> None:
    with pytest.raises(CheckpointError, match=r"COMMIT: committed by round 3, and round 2 is older"):
        check_writable(former, ROUND - 1)
    with pytest.raises(CheckpointError, match="is a complete checkpoint already"):
        check_writable(former, ROUND + 1)


def test_new_checkpoints_have_the_new_name_alone(tmp_path: Path) -> None:
    directory = path_of(put_checkpoint(LocalLocation(tmp_path / "main"), 120, round=ROUND))
    for path in (manifest_path(directory), directory / "COMMIT"):
        content = path.read_text()
        assert json.loads(content)["round"] == ROUND
        assert "incarnation" not in content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2, "incarnation": 3}, r"m\.json: incarnation=3; no such field in schema version 2"),
        ({"incarnation": 3}, r"m\.json: incarnation=3; no such field in schema version 3"),
    ],
    ids=["both names", "a former name in a new file"],
)
def test_a_former_name_beside_the_new_one_is_refused(changes: dict[str, Any], message: str) -> None:
    raw = {**json.loads(make_manifest().to_json()), **changes}
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(json.dumps(raw), "m.json")


def test_the_round_of_a_former_black_box_is_read() -> None:
    box = read_black_box(FORMER / "rank-00005.blackbox")
    assert (box.identity.round, box.identity.rank, box.identity.job) == (ROUND, 5, "demo")
