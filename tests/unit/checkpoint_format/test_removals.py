"""A removal and the start of a round, concurrently in every order of their operations: the round keeps its
checkpoint."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.checkpoint.housekeeping import Housekeeping
from megatrain.checkpoint.survey import survey
from megatrain.checkpoint_format.checkpoint_files import unpin
from megatrain.checkpoint_format.claims import Claims
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.lineage import candidates, open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.removals import Remover, being_removed
from megatrain.checkpoint_format.resume_point import resume_point
from megatrain.checkpoint_format.round_starts import RoundStart, begin_round, newest_start
from megatrain.cli import main
from megatrain.contracts.errors import CheckpointError, NewerRoundError
from megatrain.contracts.exit_codes import ExitCode
from tests.helpers.arena_snapshots import host_plan
from tests.helpers.checkpoint_tree import put_checkpoint, put_main, tree
from tests.helpers.hooked_location import HookedLocation
from tests.helpers.interleaved import Interleaved, Operation, explore
from tests.helpers.two_rounds import STEP, make_round

PLAN = host_plan("", keep_last=1, round=2)
STEPS = (10, 20, 30)


Start = Callable[[Location], None]


def put_run(directory: Path) -> Location:
    """Create a run whose round 2 has committed step 30, and keeps only that."""
    checkpoints = LocalLocation(directory)
    branch = put_main(checkpoints)
    for step in STEPS:
        put_checkpoint(branch, step, files={}, round=2)
    claim_and_begin(checkpoints, 2, "main", 0)
    return checkpoints


def claim_and_begin(checkpoints: Location, number: int, branch: str, step: int) -> None:
    assert Claims(checkpoints).take(None, number).number == number
    begin_round(checkpoints, RoundStart(number, branch, step))


def keep_house(checkpoints: Location) -> None:
    Housekeeping().run(checkpoints, PLAN)


def go_back(checkpoints: Location) -> None:
    """Start as a rollback does: at the oldest step, on a new branch."""
    number = Claims(checkpoints).take(None, 3).number
    step = candidates(checkpoints)[-1].step
    open_branch(checkpoints, "main", step, "training went wrong", round_number=number)


def go_on_before(checkpoints: Location) -> None:
    """Start as a round that cannot use the newest checkpoint: at an older step of the same branch."""
    number = Claims(checkpoints).take(None, 3).number
    step = candidates(checkpoints)[-1].step
    begin_round(checkpoints, RoundStart(number, "main", step))


def began_and_resumes_at(checkpoints: Location) -> tuple[int | None, int | None]:
    """Return the step at which round 3 began, and the step from which a job would resume now."""
    start, point = newest_start(checkpoints), resume_point(checkpoints)
    assert start is not None
    assert start.round == 3
    return start.step, None if point.candidate is None else point.candidate.step


@pytest.fixture
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs: processes are delayed here, but the power does not fail."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def explored(tmp_path: Path, first: Start, second: Start, check: Callable[[Location], None]) -> None:
    """Run two programs in every order in which each is delayed once, the first one first, and check the result."""
    template = tmp_path / "template"
    if not template.exists():
        put_run(template)

    def run(turns: tuple[int, ...]) -> list[Operation]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(template, tmp_path / "run")
        checkpoints = LocalLocation(tmp_path / "run")
        operations = Interleaved(checkpoints, first, second, turns).run()
        check(checkpoints)
        return operations

    explore(run)


@pytest.mark.slow(kept=["go_on_before"])
@pytest.mark.usefixtures("_unsynced")
@pytest.mark.parametrize("start", [go_back, go_on_before])
def test_round_keeps_its_first_step_in_every_order(tmp_path: Path, start: Start) -> None:
    ways = set[tuple[int, ...]]()

    def check(checkpoints: Location) -> None:
        began, resumes = began_and_resumes_at(checkpoints)
        assert began == resumes
        ways.add(tuple(committed_steps(checkpoints / "main")))

    explored(tmp_path, keep_house, start, check)
    explored(tmp_path, start, keep_house, check)
    # The round started before the removal, or after it.
    assert ways >= {STEPS, STEPS[-1:]}


def prune_and_go_back(checkpoints: Location) -> None:
    """Remove the oldest step, as a user does, and start at the next one, which housekeeping is about to remove."""
    newest = Claims(checkpoints).newest_number()
    list(Remover().remove(checkpoints, [("main", STEPS[0])], newest))
    go_back(checkpoints)


@pytest.mark.slow
@pytest.mark.usefixtures("_unsynced")
def test_two_removers_and_a_round_lose_no_first_step(tmp_path: Path) -> None:
    began_at = set[int | None]()

    def check(checkpoints: Location) -> None:
        began, resumes = began_and_resumes_at(checkpoints)
        assert began == resumes
        began_at.add(began)

    explored(tmp_path, keep_house, prune_and_go_back, check)
    explored(tmp_path, prune_and_go_back, keep_house, check)
    # The round started before housekeeping, or after it.
    assert began_at == set(STEPS[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("_unsynced")
def test_two_removers_of_the_same_steps_leave_the_newest(tmp_path: Path) -> None:
    notes: list[str] = []

    def remove(checkpoints: Location) -> None:
        notes.extend(Housekeeping().run(checkpoints, PLAN))

    def check(checkpoints: Location) -> None:
        assert committed_steps(checkpoints / "main") == [STEPS[-1]]
        assert being_removed(checkpoints) == {}
        assert [candidate.step for candidate in candidates(checkpoints)] == [STEPS[-1]]

    explored(tmp_path, remove, remove, check)
    assert {note.rpartition("/")[2] for note in notes} == {"step-000000010", "step-000000020"}, "none failed"


# An interrupted removal


def begin_removal(checkpoints: Location, *steps: int) -> None:
    """Leave the state of a remover that was killed before its first removal."""

    def die(action: str, path: str) -> None:
        if action == "remove":
            raise KeyboardInterrupt

    chosen = [("main", step) for step in steps]
    with pytest.raises(KeyboardInterrupt):
        list(Remover().remove(HookedLocation(checkpoints, die), chosen, Claims(checkpoints).newest_number()))


def test_a_round_resumes_from_nothing_whose_removal_has_begun(tmp_path: Path) -> None:
    checkpoints = put_run(tmp_path)
    begin_removal(checkpoints, 10, 20)
    assert [candidate.step for candidate in candidates(checkpoints)] == [30]
    assert {checkpoint.step: str(checkpoint.state) for checkpoint in survey(checkpoints).checkpoints} == {
        10: "being removed",
        20: "being removed",
        30: "committed",
    }
    # The next housekeeping completes it, whatever retention keeps; the record stays, because its writer may only be
    # frozen.
    notes = Housekeeping().run(checkpoints, replace(PLAN, keep_last=0))
    assert notes == [f"removed {checkpoints}/main/step-{step:09d}" for step in (10, 20)]
    assert set(being_removed(checkpoints)) == {("main", 10), ("main", 20)}
    assert Housekeeping().run(checkpoints, PLAN) == []


def test_the_record_goes_with_the_last_file(tmp_path: Path) -> None:
    checkpoints = put_run(tmp_path)
    Housekeeping().run(checkpoints, PLAN)
    assert committed_steps(checkpoints / "main") == [30]
    assert being_removed(checkpoints) == {}


def test_removal_record_stays_until_the_rest_is_removed(tmp_path: Path) -> None:
    checkpoints, housekeeping = put_run(tmp_path), Housekeeping()
    failed: list[str] = []

    def fail_once(action: str, path: str) -> None:
        if action == "remove" and "step-000000020" in path and not failed:
            failed.append(path)
            raise CheckpointError(f"{path}: cannot be removed: timed out")

    hooked = HookedLocation(checkpoints, fail_once)
    notes = housekeeping.run(hooked, PLAN)
    assert notes[0] == f"removed {checkpoints}/main/step-000000010"
    assert "timed out" in notes[1]
    assert set(being_removed(checkpoints)) == {("main", 10), ("main", 20)}
    assert housekeeping.run(hooked, PLAN) == [f"removed {checkpoints}/main/step-000000020"]
    assert being_removed(checkpoints) == {}


def test_removal_record_stays_when_a_round_has_started(tmp_path: Path) -> None:
    """Storage may still execute the removal whose answer was lost."""
    checkpoints, remover = put_run(tmp_path), Remover()
    newest = Claims(checkpoints).newest_number()

    def fail(action: str, path: str) -> None:
        if action == "remove":
            raise CheckpointError("timed out")

    with pytest.raises(CheckpointError, match="timed out"):
        list(remover.remove(HookedLocation(checkpoints, fail), [("main", 10)], newest))
    claim_and_begin(checkpoints, 3, "main", 20)
    with pytest.raises(NewerRoundError):
        list(remover.remove(checkpoints, [("main", 20)], newest))
    assert ("main", 10) in being_removed(checkpoints)


def test_a_remover_that_a_round_has_overtaken_removes_nothing(tmp_path: Path) -> None:
    checkpoints = put_run(tmp_path)
    newest = Claims(checkpoints).newest_number()
    claim_and_begin(checkpoints, 3, "main", 10)
    with pytest.raises(NewerRoundError, match="round 3 has started meanwhile"):
        list(Remover().remove(checkpoints, [("main", 10)], newest))
    assert committed_steps(checkpoints / "main") == list(STEPS)
    assert being_removed(checkpoints) == {}


def test_only_half_removed_checkpoints_are_an_error_with_a_hint(tmp_path: Path) -> None:
    checkpoints = put_run(tmp_path)
    begin_removal(checkpoints, 10)
    for step in (20, 30):
        (checkpoints / f"main/step-{step:09d}").remove()
    with pytest.raises(CheckpointError, match=r"no other checkpoint .* is left: .*step-000000010: .*\.removing"):
        candidates(checkpoints)
    (record,) = being_removed(checkpoints).values()
    record.remove()
    assert [candidate.step for candidate in candidates(checkpoints)] == [10]


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    checkpoints = put_run(tmp_path)
    (checkpoints / "claims/0123456789abcdef.removing").write(
        b'{"schema_version": 1, "holder": "", "steps": {"main": 10}}'
    )
    with pytest.raises(CheckpointError, match="each branch must have a list of steps; remove it when"):
        candidates(checkpoints)


# The commands


def test_commands_meet_a_removal_that_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = put_run(tmp_path / "run" / "checkpoints")
    begin_removal(checkpoints, 10)
    run = str(tmp_path / "run")
    assert main(["ckpt", "restore", run, "--step", "10", "--no-verify"]) == ExitCode.CHECKPOINT
    assert "no committed checkpoint of step 10" in capsys.readouterr().err
    assert main(["ckpt", "pin", f"{run}/checkpoints/main/step-000000010"]) == ExitCode.CHECKPOINT
    assert "a process is removing this checkpoint, or ended during the removal" in capsys.readouterr().err
    unpin(checkpoints / "main/step-000000010")
    assert main(["ckpt", "prune", run, "--keep-last", "3", "--yes"]) == ExitCode.OK
    assert re.search(r"removed main/step-000000010 \(.*its removal had begun", capsys.readouterr().out)
    assert committed_steps(checkpoints / "main") == [20, 30]


def test_step_whose_removal_has_begun_is_not_written(tmp_path: Path) -> None:
    checkpoints = LocalLocation(tmp_path / "checkpoints")
    put_main(checkpoints, 5)
    put_checkpoint(checkpoints / "main", STEP, files={}, round=1)
    begin_removal(checkpoints, STEP)
    before = tree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="a process is removing this checkpoint, or ended during the removal"):
        make_round(tmp_path, 2, str(checkpoints)).persist(checkpoints)
    assert tree(tmp_path / "checkpoints") == before
