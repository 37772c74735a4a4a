"""`megatrain ckpt index`: checkpoints of before the index, with torch and without."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.checkpoint.checked_files import find_stored
from megatrain.checkpoint.metadata_unpickler import read_metadata
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.contracts.checkpoint_files import read_manifest
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import LocalLocation
from tests.helpers.checkpoint_tree import tree
from tests.helpers.saved_checkpoint import Ckpt
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

INDEX = "r000002-index.json"
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from megatrain.cli import main
print(json.dumps([main(["ckpt", *words]) for words in json.loads(sys.argv[1])]), file=sys.stderr)
"""


def without_torch(*lines: list[object]) -> tuple[list[int], str]:
    """Run `megatrain ckpt` with each line of words where torch cannot be imported; return exit codes and errors."""
    words = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=True,
    )
    *errors, codes = done.stderr.splitlines()
    return json.loads(codes), "\n".join(errors)


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """Return a checkpoint that was written before there was an index."""
    return shutil.copytree(ROOT / "tests" / "golden" / "former-checkpoints" / "alone", tmp_path / "alone")


def test_an_index_makes_torch_superfluous_and_changes_nothing_else(ckpt: Ckpt, former: Path) -> None:
    before = tree(former)
    verbs: list[list[object]] = [["inspect", former, "--tensors"], ["verify", former], ["diff", former, former]]
    codes, errors = without_torch(*verbs)
    assert codes == [66, 66, 66]
    assert errors.count("which needs torch, and torch cannot be loaded") == 3
    assert errors.count("`megatrain ckpt index` writes the index on a machine that has torch") == 3

    found = ckpt("index", former, "--json")

    assert (found["index"], found["is_written"]) == (INDEX, True)
    assert {**before, INDEX: (former / INDEX).read_bytes()} == tree(former)
    assert without_torch(*verbs) == ([0, 0, 0], "")
    assert "OK" in ckpt("verify", former)
    place = LocalLocation(former)
    metadata = read_metadata((former / ".metadata").read_bytes(), "x")
    assert find_stored(place, read_manifest(place)) == metadata


@pytest.mark.slow
def test_what_cannot_be_verified_without_torch_does_not_count_as_damaged(tmp_path: Path) -> None:
    run = shutil.copytree(ROOT / "tests" / "golden" / "former-checkpoints", tmp_path / "run")
    before = tree(run / "checkpoints")
    codes, errors = without_torch(["verify", run, "--step", 25], ["ls", run])
    assert codes == [66, 0]
    assert "needs torch" in errors
    assert tree(run / "checkpoints") == before


def test_torch_does_where_there_is_no_index(ckpt: Ckpt, former: Path) -> None:
    before = ckpt("inspect", former, "--tensors", "--json")
    ckpt("index", former)
    assert ckpt("inspect", former, "--tensors", "--json") == before


def test_a_checkpoint_of_now_has_its_own(ckpt: Ckpt, run: Path) -> None:
    place = run / "checkpoints/branch-0002/step-000000025"
    before = tree(place)
    assert "index.json was there already" in ckpt("index", place)
    assert ckpt("index", run, "--json")["is_written"] is False
    assert tree(place) == before


def test_an_index_that_the_manifest_does_not_list_is_never_what_tensors_are_read_by(ckpt: Ckpt, former: Path) -> None:
    ckpt("index", former)
    raw = json.loads((former / INDEX).read_text())
    (former / INDEX).write_text(json.dumps({**raw, "metadata": "sha256:" + "0" * 64}))

    assert f"{former / INDEX}: belongs to another checkpoint" in ckpt("inspect", former, code=66)
    assert f"{former / INDEX}: belongs to another checkpoint" in ckpt("verify", former, code=66)
    place = LocalLocation(former)
    reader = ParameterReader(place, read_manifest(place))
    assert reader.tensors == read_metadata((former / ".metadata").read_bytes(), "x").tensors

    ckpt("index", former)
    assert "OK" in ckpt("verify", former)


def test_metadata_that_was_changed_gets_no_index(ckpt: Ckpt, former: Path) -> None:
    metadata = former / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-1] + b"?")
    assert f"{metadata}: differs from its entry in the manifest" in ckpt("index", former, code=66)
    assert not (former / INDEX).exists()


def test_an_index_goes_with_its_checkpoint(ckpt: Ckpt, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "golden" / "former-checkpoints", tmp_path / "run")
    main = tmp_path / "run/checkpoints/main"
    ckpt("index", main / "step-000000010")
    ckpt("prune", tmp_path / "run", "--keep-last", 1, "--abandoned", "--yes")
    assert not (main / "step-000000010").exists()


def test_an_index_that_is_too_large_is_not_even_read(former: Path) -> None:
    with (former / INDEX).open("wb") as file:
        file.truncate(2**28 + 1)
    place = LocalLocation(former)
    with pytest.raises(CheckpointError, match=r"r000002-index\.json: 268435457 bytes, more than the 268435456"):
        find_stored(place, read_manifest(place))
