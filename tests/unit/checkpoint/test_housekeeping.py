"""The checkpoints that are removed after a commit, and those that never are."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.checkpoint.housekeeping import Housekeeping
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.checkpoint_files import pin
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.lineage import open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.verifications import Verification, record_verifications
from megatrain.contracts.errors import CheckpointError
from tests.helpers.arena_snapshots import host_plan
from tests.helpers.checkpoint_tree import path_of, put_checkpoint, put_main, put_manifest
from tests.helpers.hooked_location import HookedLocation

PLAN = host_plan("", keep_last=2, commit_timeout_s=600.0)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "checkpoints")


def put_run(checkpoints: Location, *steps: int) -> Location:
    """Create a run on main with some committed steps that are complete: their checkpoints have no files."""
    main = put_main(checkpoints)
    for step in steps:
        put_checkpoint(main, step, files={})
    return main


def names(branch: Location) -> list[str]:
    return [entry.name for entry in branch.entries() if entry.name.startswith("step-")]


def test_old_checkpoints_go_and_kept_ones_stay(checkpoints: Location) -> None:
    main = put_run(checkpoints, *range(10, 110, 10))
    open_branch(checkpoints, "main", 25, "")
    pin(main / "step-000000040", "good")
    notes = Housekeeping().run(checkpoints, replace(PLAN, keep_every=50))
    # the pinned one, every 50th, the last two, and the one from which branch-0002 continues
    assert committed_steps(main) == [20, 40, 50, 90, 100]
    assert names(main) == [f"step-{step:09d}" for step in (20, 40, 50, 90, 100)]
    assert notes == [f"removed {main}/step-{step:09d}" for step in (10, 30, 60, 70, 80)]
    assert Housekeeping().run(checkpoints, replace(PLAN, keep_every=50)) == []


def test_all_are_kept_unless_asked(checkpoints: Location) -> None:
    main = put_run(checkpoints, 10, 20, 30)
    assert Housekeeping().run(checkpoints, replace(PLAN, keep_last=0)) == []
    assert committed_steps(main) == [10, 20, 30]


def test_damaged_checkpoint_does_not_count_for_retention(checkpoints: Location) -> None:
    main = put_run(checkpoints, 10, 20, 30, 40, 50)
    record_verifications(checkpoints, [Verification("main", step, time.time(), "changed") for step in (20, 40, 50)])
    assert Housekeeping().run(checkpoints, PLAN) == []
    assert committed_steps(main) == [10, 20, 30, 40, 50], "10 and 30 are the newest two intact checkpoints"
    put_checkpoint(main, 60, files={})
    assert Housekeeping().run(checkpoints, PLAN) == [f"removed {main}/step-{step:09d}" for step in (10, 20)]


def test_only_the_branch_that_is_written_is_touched(checkpoints: Location) -> None:
    main = put_run(checkpoints, 10, 20, 30)
    branch = open_branch(checkpoints, "main", 30, "").name
    for step in (40, 50, 60):
        put_checkpoint(checkpoints / branch, step, files={}, round=9)
    Housekeeping().run(checkpoints, replace(PLAN, branch=branch, keep_last=1, round=9))
    assert committed_steps(main) == [10, 20, 30]
    assert committed_steps(checkpoints / branch) == [60]


def begin(branch: Location, step: int, round_number: int, started_unix_s: float) -> None:
    directory = put_manifest(branch, step)
    WritingMark(round_number, "demo", started_unix_s).write(directory)


def test_unfinished_checkpoint_without_a_writer_is_removed(checkpoints: Location) -> None:
    main = put_run(checkpoints, 50)
    put_manifest(main, 10)
    begin(main, 11, round_number=2, started_unix_s=2e9)
    begin(main, 12, round_number=1, started_unix_s=1e9)
    path_of(main / "step-000000013").mkdir()
    kept = ["step-000000020", "step-000000021", "step-000000022", "step-000000023", "step-000000050", "step-000000060"]
    # An older round may still write it, a newer round writes it, COMMIT is damaged, or it is pinned.
    begin(main, 20, round_number=1, started_unix_s=3e9)
    begin(main, 21, round_number=3, started_unix_s=1e9)
    (put_manifest(main, 22) / "COMMIT").write(b"?")
    (put_manifest(main, 23) / "PINNED").write(b"?")
    begin(main, 60, round_number=2, started_unix_s=1e9)
    notes = Housekeeping().run(checkpoints, replace(PLAN, keep_last=0))
    assert names(main) == kept
    assert len(notes) == 4


def test_checkpoint_without_commit_is_kept_like_a_whole_one(checkpoints: Location) -> None:
    main = put_run(checkpoints, 40)
    for step in (10, 20, 30):
        put_manifest(main, step, files={})
    pin_file = main / "step-000000010" / "PINNED"
    pin_file.write(b"?")
    housekeeping = Housekeeping()
    lacking = "it is complete except for a matching COMMIT"
    left = [f"kept {main}/step-0000000{step}0: {lacking}" for step in (1, 2, 3)]
    assert housekeeping.run(checkpoints, replace(PLAN, keep_last=0)) == left
    # reported once and read once
    assert housekeeping.run(checkpoints, replace(PLAN, keep_last=0)) == []
    assert names(main) == [f"step-0000000{step}0" for step in (1, 2, 3, 4)]
    # As if it were intact: 30 is one of the newest two, and a branch begins at 20.
    open_branch(checkpoints, "main", 25, "")
    assert housekeeping.run(checkpoints, PLAN) == []
    pin_file.remove()
    assert housekeeping.run(checkpoints, PLAN) == [f"removed {main}/step-000000010"]
    put_checkpoint(main, 50, files={})
    assert housekeeping.run(checkpoints, PLAN) == [f"removed {main}/step-000000030"]
    assert names(main) == ["step-000000020", "step-000000040", "step-000000050"]


def test_removal_waits_for_a_commit(checkpoints: Location) -> None:
    main = put_main(checkpoints)
    put_manifest(main, 10)
    put_manifest(main, 20)
    assert Housekeeping().run(checkpoints, PLAN) == []
    assert len(names(main)) == 2


def test_a_damaged_lineage_keeps_everything(checkpoints: Location) -> None:
    main = put_run(checkpoints, 10, 20, 30)
    (checkpoints / "branch-0002" / "BRANCH").write(b"?")
    (notes,) = Housekeeping().run(checkpoints, PLAN)
    assert "older checkpoints were not removed: " in notes
    assert "branch-0002/BRANCH: not JSON" in notes
    assert committed_steps(main) == [10, 20, 30]


def test_a_removal_that_fails_is_reported(checkpoints: Location) -> None:
    put_run(checkpoints, 10, 20, 30)

    def fail(action: str, path: str) -> None:
        if action == "remove":
            raise CheckpointError(f"{path}: cannot be removed: Permission denied")

    (notes,) = Housekeeping().run(HookedLocation(checkpoints, fail), PLAN)
    assert notes.startswith("older checkpoints were not removed: main/step-000000010/")
    assert committed_steps(checkpoints / "main") == [10, 20, 30]


def test_known_checkpoints_are_not_read_again(checkpoints: Location) -> None:
    main = put_run(checkpoints, *range(10, 60, 10))
    reads: list[str] = []
    hooked = HookedLocation(checkpoints, lambda action, path: reads.append(path) if action == "read" else None)
    plan = replace(PLAN, keep_last=0)
    housekeeping = Housekeeping()
    housekeeping.run(hooked, plan)
    # The newest checkpoint is read once more: it decides which others are removed.
    newest = "main/step-000000050/COMMIT"
    assert sorted({path for path in reads if path.endswith("COMMIT") and path != newest}) == sorted(
        path for path in reads if path.endswith("COMMIT") and path != newest
    )
    reads.clear()
    put_checkpoint(main, 60, files={})
    housekeeping.run(hooked, plan)
    assert {path for path in reads if path.endswith("COMMIT")} == {"main/step-000000060/COMMIT"}
