"""`megatrain ckpt restore`: a new branch at an older step, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.lineage import current_branch, list_branches
from megatrain.contracts.location import LocalLocation
from tests.helpers.checkpoint_tree import found, put_main, put_manifest, tree
from tests.helpers.saved_checkpoint import Ckpt, put_whole


def checkpoints_of(run: Path) -> LocalLocation:
    return LocalLocation(run / "checkpoints")


def test_the_run_goes_on_from_the_step_on_a_new_branch(ckpt: Ckpt, run: Path) -> None:
    before = tree(run)
    document = ckpt("restore", run, "--step", 10, "--reason", "too hot", "--json")

    assert (document["branch"], document["parent"], document["step"]) == ("branch-0003", "main", 10)
    assert document["abandoned"] == ["branch-0002/step-000000025", "main/step-000000020"]
    assert found(checkpoints_of(run)) == [("main", 10)]
    branch = next(one for one in list_branches(checkpoints_of(run)) if one.name == "branch-0003")
    assert branch.reason == "too hot"
    after = tree(run)
    assert {name for name in after if before.get(name) != after[name]} == {
        "checkpoints/RESUME", "checkpoints/branch-0003/BRANCH",
    }  # fmt: skip
    assert before.keys() <= after.keys()


def test_what_is_restored_can_be_of_an_abandoned_branch(ckpt: Ckpt, run: Path) -> None:
    message = ckpt("restore", run, "--step", 40, code=66)
    assert "no committed checkpoint of step 40 in its current line" in message

    text = ckpt("restore", run, "--step", 40, "--branch", "main")

    assert "goes on from" in text
    assert "abandoned, and still there: branch-0002/step-000000025" in text
    assert found(checkpoints_of(run)) == [("main", 40), ("main", 30), ("main", 20), ("main", 10)]


def test_one_checkpoint_needs_no_step(ckpt: Ckpt, run: Path) -> None:
    ckpt("restore", run / "checkpoints/main/step-000000030")
    assert found(checkpoints_of(run))[0] == ("main", 30)


def test_a_run_needs_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "restore", str(run)]) == 2
    assert "--step is needed" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["uncommitted", "damaged"])
def test_what_is_not_whole_is_refused_and_nothing_changes(ckpt: Ckpt, run: Path, damage: str) -> None:
    place = run / "checkpoints/main/step-000000020"
    if damage == "uncommitted":
        (place / "COMMIT").unlink()
    else:
        (place / ".metadata").write_bytes(b"")
    before = tree(run)

    message = ckpt("restore", run, "--step", 20, code=66)

    assert ("there are: branch-0002/25, main/10" if damage == "uncommitted" else "nothing was changed") in message
    assert tree(run) == before


def test_verification_can_be_left_out(ckpt: Ckpt, run: Path) -> None:
    (run / "checkpoints/main/step-000000020/.metadata").write_bytes(b"")
    assert ckpt("restore", run, "--step", 20, "--no-verify", "--json")["is_verified"] is False
    assert current_branch(checkpoints_of(run)) == "branch-0003"


def test_a_run_whose_line_is_lost_can_go_on_from_another_branch(ckpt: Ckpt, tmp_path: Path) -> None:
    run = tmp_path / "run"
    main_branch = put_main(checkpoints_of(run))
    put_whole(main_branch, 10)
    ckpt("restore", run, "--step", 10)
    put_manifest(checkpoints_of(run) / "branch-0002", 12)
    put_whole(main_branch, 20)
    (main_branch / "step-000000010").remove()

    assert ckpt("restore", run, "--step", 20, "--branch", "main", "--json")["abandoned"] == []
    assert found(checkpoints_of(run)) == [("main", 20)]
