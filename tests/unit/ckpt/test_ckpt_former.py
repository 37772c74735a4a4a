"""Checkpoints that were written before rounds claimed: every verb takes them, and a run goes on from them.

tests/golden/former-checkpoints was written by the program of that time: a run with a branch, and a checkpoint of two
ranks that lies alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.contracts.checkpoint_files import committed_steps, read_manifest
from megatrain.contracts.lineage import candidates, current_branch, open_branch
from megatrain.contracts.location import LocalLocation
from tests.helpers.checkpoint_tree import found
from tests.helpers.saved_checkpoint import Ckpt
from tests.helpers.source_tree import ROOT


@pytest.fixture
def former(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "tests" / "golden" / "former-checkpoints", tmp_path / "run")
    return tmp_path / "run"


def test_they_are_listed_whole_and_gone_on_from(ckpt: Ckpt, former: Path) -> None:
    checkpoints = LocalLocation(former / "checkpoints")
    assert current_branch(checkpoints) == "branch-0002"
    assert found(checkpoints) == [("branch-0002", 25), ("main", 20), ("main", 10)]
    listed = ckpt("ls", former, "--json")["checkpoints"]
    assert {(one["branch"], one["step"], one["state"]) for one in listed} == {
        *(("main", step, "committed") for step in (10, 20, 30)),
        ("branch-0002", 25, "committed"),
    }
    assert all(not one["problems"] for one in ckpt("verify", former, "--all", "--json")["checkpoints"])
    assert all(not one["problems"] for one in ckpt("verify", former / "alone", "--json")["checkpoints"])


def test_they_are_pruned_and_gone_back_to(ckpt: Ckpt, former: Path) -> None:
    checkpoints = LocalLocation(former / "checkpoints")
    ckpt("restore", former, "--step", 10)
    assert found(checkpoints) == [("main", 10)]
    ckpt("prune", former, "--keep-last", 1, "--abandoned", "--yes")
    assert committed_steps(checkpoints / "main") == [10]
    # the number that it claims is above all that have committed anything
    assert open_branch(checkpoints, "main", 10, "again").name == "branch-0004"
    assert [one.step for one in candidates(checkpoints)] == [10]


def test_they_are_converted_and_compared(ckpt: Ckpt, former: Path, tmp_path: Path) -> None:
    ckpt("reshard", former / "alone", "--output", tmp_path / "out", "--tp", 2)
    assert "OK" in ckpt("verify", tmp_path / "out")
    difference = ckpt("diff", former / "alone", tmp_path / "out", "--tensors", "--json")
    assert difference["tensors"] == [], difference
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (former / "alone" / "tokenizer.json").read_bytes()
    assert read_manifest(LocalLocation(tmp_path / "out")).round == 2
