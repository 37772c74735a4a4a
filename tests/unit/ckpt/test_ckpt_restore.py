"""`megatrain ckpt restore`: a new branch at an older step, and nothing else changes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.lineage import current_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.cli import main
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.checkpoint_tree import found, put_main, put_manifest, tree
from tests.helpers.forked_program import run_forked
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
        "checkpoints/claims/00000003", "checkpoints/claims/00000003.resume", "checkpoints/branch-0003/BRANCH",
    }  # fmt: skip
    assert before.keys() <= after.keys()


def test_checkpoint_of_an_abandoned_branch_can_be_restored(ckpt: Ckpt, run: Path) -> None:
    message = ckpt("restore", run, "--step", 40, code=66)
    assert "no committed checkpoint of step 40 in its current ancestry" in message

    text = ckpt("restore", run, "--step", 40, "--branch", "main")

    assert "resumes from" in text
    assert "abandoned, but not removed: branch-0002/step-000000025" in text
    assert found(checkpoints_of(run)) == [("main", 40), ("main", 30), ("main", 20), ("main", 10)]


def test_single_checkpoint_needs_no_step_argument(ckpt: Ckpt, run: Path) -> None:
    ckpt("restore", run / "checkpoints/main/step-000000030")
    assert found(checkpoints_of(run))[0] == ("main", 30)


def test_a_run_needs_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "restore", str(run)]) == 2
    assert "--step is needed" in capsys.readouterr().err


def test_checkpoint_outside_of_a_run_cannot_be_restored(ckpt: Ckpt, tmp_path: Path) -> None:
    place = put_whole(LocalLocation(tmp_path / "elsewhere"), 3)
    for options in ([], ["--step", 3]):
        assert "outside of a run; checkpoint.load starts a run from it" in ckpt("restore", place, *options, code=66)


@pytest.mark.parametrize("damage", ["uncommitted", "damaged"])
def test_incomplete_checkpoint_is_refused_and_nothing_changes(ckpt: Ckpt, run: Path, damage: str) -> None:
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


def test_run_with_a_lost_lineage_resumes_on_another_branch(ckpt: Ckpt, tmp_path: Path) -> None:
    run = tmp_path / "run"
    main_branch = put_main(checkpoints_of(run))
    put_whole(main_branch, 10)
    ckpt("restore", run, "--step", 10)
    put_manifest(checkpoints_of(run) / "branch-0002", 12)
    put_whole(main_branch, 20)
    (main_branch / "step-000000010").remove()

    assert ckpt("restore", run, "--step", 20, "--branch", "main", "--json")["abandoned"] == []
    assert found(checkpoints_of(run)) == [("main", 20)]


def test_restore_of_a_run_that_is_training_needs_force(
    ckpt: Ckpt, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run)
    with RunDirectory(run).locked():
        message = ckpt("restore", run, "--step", 10, code=66)
        assert f"is training in {run}. Nothing was changed" in message
        assert tree(run).keys() - before.keys() == {"lock"}

        assert main(["ckpt", "restore", str(run), "--step", "10", "--force", "--json"]) == 0
        captured = capsys.readouterr()
    assert len(json.loads(captured.out)["running"]) == 1
    assert "WARNING: process" in captured.err
    assert "until it is started again" in captured.err
    assert current_branch(checkpoints_of(run)) == "branch-0003"
    assert ckpt("restore", run, "--step", 10, "--json")["running"] == []


RESTORE_AND_START = """
import sys
from contextlib import ExitStack
from pathlib import Path

from megatrain.cli import main
from megatrain.run_files.run_directory import RunDirectory

run = sys.argv[1]
job = ExitStack()
started = []

def start_job(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".distcp") and not started:
        started.append(arguments[0])
        job.enter_context(RunDirectory(Path(run)).locked())

sys.addaudithook(start_job)
code = main(["ckpt", "restore", run, "--step", "10"])
assert started
sys.exit(code)
"""
"""A job starts when the first file of data is opened, to verify it."""


def test_job_that_starts_during_verification_is_noticed(run: Path) -> None:
    done = run_forked(["-c", RESTORE_AND_START, str(run)])

    assert (done.returncode, "is training in" in done.stderr, "Nothing was changed" in done.stderr) == (66, True, True)
    assert current_branch(checkpoints_of(run)) == "branch-0002"


def test_possible_job_on_another_host_is_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoints_of(run) / "branch-0002/step-000000030/WRITING").write(
        json.dumps({"schema_version": 1, "round": 3, "job": "demo", "started_unix_s": time.time()}).encode()
    )
    assert main(["ckpt", "restore", str(run), "--step", "10", "--json"]) == 0
    captured = capsys.readouterr()
    assert "note: step 30 of branch-0002 was begun" in captured.err
    assert json.loads(captured.out)["traces"]


def test_a_long_list_of_abandoned_ones_is_shortened(ckpt: Ckpt, tmp_path: Path) -> None:
    put_main(checkpoints_of(tmp_path), *range(1, 9))
    text = ckpt("restore", tmp_path, "--step", 1, "--no-verify")
    assert "abandoned, but not removed: 7 checkpoints up to main/step-000000008" in text
