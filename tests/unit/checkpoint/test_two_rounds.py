"""Two rounds commit the same step concurrently: wherever either is delayed, a committed checkpoint stays loadable."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.checkpoint.housekeeping import Housekeeping
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.claims import Claims
from megatrain.checkpoint_format.commit import committed_steps, is_committed
from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.round_starts import RoundStart, begin_round
from megatrain.checkpoint_format.url_location import open_location
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import put_main
from tests.helpers.hooked_location import HookedLocation
from tests.helpers.power_cuts import Disk, put_tree, watched
from tests.helpers.two_rounds import STEP, HeldUp, make_round, newest, two_rounds

Put = Callable[[Path], Location]
"""Returns an empty place for the checkpoints of a run in this directory."""


@pytest.fixture(params=["disk", "memory"])
def put(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Checkpoints on a disk, or in memory, which puts and removes files as object stores do."""
    if request.param == "disk":
        # Processes are delayed here, but the power does not fail.
        monkeypatch.setattr(os, "fsync", lambda file: None)
        yield lambda directory: LocalLocation(directory / "checkpoints")
        return
    root = open_location(f"memory:/{tmp_path}")
    yield lambda directory: root / directory.name / "checkpoints"
    root.remove()


def race(put: Put, directory: Path, number: int) -> str:
    """Delay an older round before its change `number` until the newer one has committed; return that change.

    After the newer round's retention, no other checkpoint could be loaded.
    """
    checkpoints = put(directory)
    put_main(checkpoints, 5)
    old, new = two_rounds(directory, str(checkpoints))

    def overtake() -> None:
        new.persist(checkpoints)
        assert f"removed {checkpoints}/main/step-000000005" in Housekeeping().run(checkpoints, new.plan)
        assert newest(checkpoints) == STEP

    held_up = HeldUp(number, overtake)
    with suppress(CheckpointError):
        old.persist(held_up.over(checkpoints))
        Housekeeping().run(checkpoints, old.plan)
    assert newest(checkpoints) == STEP, held_up.point
    return held_up.point


@pytest.mark.slow(kept=["disk"])
def test_older_round_delayed_before_each_of_its_changes(put: Put, tmp_path: Path) -> None:
    points: list[str] = []
    while not points or points[-1]:
        points.append(race(put, tmp_path / str(len(points)), len(points)))
    assert points[0] == "write WRITING"
    for name in ("metadata", "index", "manifest", "COMMIT", "remove WRITING"):
        assert any(name in point for point in points), points


@pytest.mark.slow(kept=["disk-refused", "disk-lost"])
@pytest.mark.parametrize("is_done", [False, True], ids=["refused", "lost"])
def test_rounds_race_while_a_put_fails(put: Put, tmp_path: Path, is_done: bool) -> None:
    """Each put of the older round in turn fails or loses its answer; then the newer round starts, and the older one
    tries again."""
    number, has_failed, lock = 0, True, threading.Lock()
    while has_failed:
        directory = tmp_path / str(number)
        checkpoints = put(directory)
        put_main(checkpoints)
        make_round(directory, 1, str(checkpoints), step=5).persist(checkpoints)
        old, new = two_rounds(directory, str(checkpoints))
        left, has_failed = number, False

        def fail(action: str, path: str) -> None:
            nonlocal left, has_failed
            with lock:  # Files are written in parallel.
                if action in ("write", "close"):
                    left -= 1
                    if left == -1:
                        has_failed = True
                        raise CheckpointError(f"{path}: injected")

        hooks = {"after" if is_done else "hook": fail}
        with suppress(CheckpointError):
            old.persist(HookedLocation(checkpoints, **hooks))
        assert newest(checkpoints) in (5, STEP), number
        new.persist(checkpoints)
        assert newest(checkpoints) == STEP, number
        with suppress(CheckpointError):
            old.persist(checkpoints)
        assert newest(checkpoints) == STEP, number
        number += 1
    assert number > 8


# Commits of an older round after a newer round has continued without it


def begin(checkpoints: Location, round_number: int, step: int) -> None:
    assert Claims(checkpoints).take(None, round_number).number == round_number
    begin_round(checkpoints, RoundStart(round_number, "main", step))


def test_commit_delayed_until_a_newer_round_is_too_late(tmp_path: Path) -> None:
    """The older round has searched for newer claims, and is delayed at its last write."""
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints)
    make_round(tmp_path, 1, str(checkpoints), step=5).persist(checkpoints)
    old, new = two_rounds(tmp_path, str(checkpoints))

    def go_on(action: str, path: str) -> None:
        if action == "write" and path.endswith("COMMIT"):
            begin(checkpoints, 3, 5)

    old.persist(HookedLocation(checkpoints, go_on))
    assert is_committed(checkpoints / "main/step-000000010")
    assert newest(checkpoints) == 5
    # It removes nothing either: the newer round resumed from step 5.
    (note,) = Housekeeping().run(checkpoints, old.plan)
    assert note == "older checkpoints are left to round 3, which continues main"
    # The newer round reaches that step, and no file of the older round blocks it.
    new.persist(checkpoints)
    assert newest(checkpoints) == STEP
    assert read_manifest(checkpoints / "main/step-000000010").round == 3
    Housekeeping().run(checkpoints, new.plan)
    assert committed_steps(checkpoints / "main") == [STEP]
    assert newest(checkpoints) == STEP


def test_older_round_that_checks_again_commits_nothing(tmp_path: Path) -> None:
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints)
    old, _ = two_rounds(tmp_path, str(checkpoints))
    begin(checkpoints, 3, 5)
    with pytest.raises(CheckpointError, match="round 3 resumed from step 5 of main, and round 2 is older"):
        old.persist(checkpoints)
    assert not (checkpoints / "main/step-000000010").exists()


@pytest.mark.parametrize(
    "start", [RoundStart(3, "main", STEP), RoundStart(3, "branch-0002", 5), RoundStart(3, "main", None)]
)
def test_resumed_snapshot_may_still_be_stored_by_an_older_round(tmp_path: Path, start: RoundStart) -> None:
    """A restart resumes from memory while the older round's writer is writing that snapshot, or on another branch."""
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints)
    old, _ = two_rounds(tmp_path, str(checkpoints))
    Claims(checkpoints).take(None, 3)
    begin_round(checkpoints, start)
    old.persist(checkpoints)
    assert [candidate.step for candidate in candidates(checkpoints, "main")] == [STEP]


def test_claim_without_a_resume_point_keeps_all_checkpoints(tmp_path: Path) -> None:
    """It may have read the checkpoints before the older round committed."""
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints, 5)
    old, _ = two_rounds(tmp_path, str(checkpoints))
    old.persist(checkpoints)
    Claims(checkpoints).take(None, 3)
    (note,) = Housekeeping().run(checkpoints, old.plan)
    assert "are left to round 3" in note
    assert committed_steps(checkpoints / "main") == [5, STEP]


def test_removal_does_not_count_an_unfinished_newest(tmp_path: Path) -> None:
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints, 5)
    old, _ = two_rounds(tmp_path, str(checkpoints))
    housekeeping = Housekeeping()
    old.persist(checkpoints)
    (checkpoints / "main/step-000000010/r000002-rank-00001.distcp").remove()
    (note,) = housekeeping.run(checkpoints, old.plan)
    assert note.startswith("older checkpoints were not removed: the newest one is not complete: ")
    assert committed_steps(checkpoints / "main") == [5, STEP]


def test_round_number_claimed_by_another_is_not_used(tmp_path: Path) -> None:
    """Storage did not answer when this round began, and has another round with its number now."""
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints)
    mine = make_round(tmp_path, 2, str(checkpoints), claim=Claims.unwritten(None, 2).content().decode())
    begin(checkpoints, 2, 0)
    with pytest.raises(CheckpointError, match="claims/00000002: another process has claimed round 2"):
        mine.persist(checkpoints)
    (checkpoints / "claims").remove()
    mine.persist(checkpoints)
    assert newest(checkpoints) == STEP
    assert Claims(checkpoints).newest_number() == 2


# Power cuts


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3, 8, 9, 10, 11, 13])
def test_power_cuts_while_two_rounds_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Unsynced data is lost at random: a job always finds an intact checkpoint to resume from."""
    run, draw = tmp_path / "run", random.Random(number)
    checkpoints = LocalLocation(run / "checkpoints")
    put_main(checkpoints)
    make_round(tmp_path, 1, str(checkpoints), step=5).persist(checkpoints)
    old, new = two_rounds(tmp_path, str(checkpoints))
    seen = set[frozenset[tuple[str, bytes | None]]]()

    def cut(disk: Disk) -> None:
        for _ in range(4):
            tree = disk.after_a_power_cut(draw)
            state = frozenset(tree.items())
            if state in seen:
                continue
            seen.add(state)
            left = tmp_path / f"left-{len(seen)}"
            put_tree(tree, left)
            assert newest(LocalLocation(left / "checkpoints")) in (5, STEP)
            shutil.rmtree(left)

    with watched(run, cut, monkeypatch) as disk:

        def overtake() -> None:
            new.persist(checkpoints)
            Housekeeping().run(checkpoints, new.plan)

        with suppress(CheckpointError):
            old.persist(HeldUp(number, overtake).over(checkpoints))
            Housekeeping().run(checkpoints, old.plan)
        cut(disk)
    assert newest(checkpoints) == STEP
    assert len(seen) > 20, len(seen)
