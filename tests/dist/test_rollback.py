"""A rollback continues from an earlier checkpoint, as a run whose data never contained the skipped batches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.lineage import candidates, current_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.records.rounds import Rollback
from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_bitwise, assert_states_bitwise
from tests.helpers.rank_pool import RankError
from tests.helpers.training_case import CaseOrders, make_config, on_layout

STEPS = 8
BATCH = 8
SIZES = (1, 1, 2)
BACK = Rollback("incident-1", to_step=4, skip_from=4, skip_to=5)
HIDDEN = (4 * BATCH, 6 * BATCH)
"""The samples of steps 4 and 5."""


def tables(data: Tables, directory: Path, *, interval: int = 3, load: str = "") -> list[Tables]:
    return [
        {"job": {"run_directory": str(directory)}, "train": {"steps": STEPS}},
        {"checkpoint": {"interval": interval, "keep_last": 10, "save_at_end": True, "load": load}},
        data,
        {"model": {"num_layers": 1}},
        on_layout(*SIZES),
    ]


def checkpoints_of(directory: Path) -> LocalLocation:
    return LocalLocation(directory / "checkpoints")


@pytest.fixture(scope="module")
def trained(jobs: TrainingJobs, train_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Return the directory of a run with checkpoints of steps 3, 6 and 8, and the run. Tests must not change it."""
    directory = tmp_path_factory.mktemp("trained")
    run = jobs.run(make_config(*tables(train_data, directory)))
    assert [candidate.step for candidate in candidates(checkpoints_of(directory))] == [8, 6, 3]
    return directory, run


@pytest.fixture(scope="module")
def oracle(
    jobs: TrainingJobs, train_data: Tables, trained: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Return a run from the checkpoint of step 3 over data without the skipped samples."""
    load = str(trained[0] / "checkpoints" / "main" / step_directory_name(3))
    return never_had(jobs, train_data, tmp_path_factory.mktemp("oracle"), load)


def copied(trained: tuple[Path, Run], directory: Path) -> Path:
    """Return a new run directory with copies of the checkpoints."""
    shutil.copytree(trained[0] / "checkpoints", directory / "run" / "checkpoints")
    return directory / "run"


def never_had(jobs: TrainingJobs, data: Tables, directory: Path, load: str) -> Run:
    """Return a run from a checkpoint, or from the beginning, over an order without the samples."""
    config = make_config(*tables(data, directory / "oracle", load=load))
    return jobs.run(config, CaseOrders(hidden=HIDDEN))


def test_rollback_equals_a_run_without_the_skipped_batches(
    jobs: TrainingJobs, train_data: Tables, trained: tuple[Path, Run], oracle: Run, tmp_path: Path
) -> None:
    before = trained[1]
    place = copied(trained, tmp_path)
    after = jobs.run(make_config(*tables(train_data, place)), CaseOrders(rollback=BACK))

    assert [report.step for report in after.steps] == [4, 5, 6, 7, 8]
    assert after.losses == oracle.losses
    assert after.grad_norms == oracle.grad_norms
    assert_bitwise(after.final, oracle.final)
    assert_states_bitwise(after.final_state, oracle.final_state)
    # Step 3 was good and is the same; the later steps have other batches.
    assert after.losses[0] == before.losses[3]
    assert after.losses[1] != before.losses[4]
    read = [number for samples in after.samples_by_step().values() for number in samples]
    assert sorted(read)[: 5 * BATCH] == [*range(3 * BATCH, 4 * BATCH), *range(6 * BATCH, 10 * BATCH)]
    checkpoints = checkpoints_of(place)
    branch = next(one for one in list_branches(checkpoints) if one.name == current_branch(checkpoints))
    assert (branch.parent, branch.parent_step, branch.rollback) == ("main", 3, BACK.rollback_id)
    assert branch.data is not None
    assert branch.data.skipped == (HIDDEN,)
    newest = candidates(checkpoints)[0]
    manifest = read_manifest(newest.location)
    assert (newest.branch, newest.step) == (branch.name, 8)
    assert (manifest.data.skipped, manifest.consumed_samples) == ((HIDDEN,), 10 * BATCH)
    # The abandoned checkpoints still exist, and are never the newest again.
    assert (place / "checkpoints" / "main" / step_directory_name(8)).is_dir()


@pytest.mark.slow
def test_rollback_is_done_once_and_kept_by_restarts(
    jobs: TrainingJobs, train_data: Tables, trained: tuple[Path, Run], oracle: Run, tmp_path: Path
) -> None:
    """A restart before the branch has a checkpoint gives the same run, whether or not the rollback is requested
    again."""
    place = copied(trained, tmp_path)
    rare = make_config(*tables(train_data, place, interval=3))
    stopped = jobs.run(rare, CaseOrders(rollback=BACK, stop_at=(0, 4)))
    assert [report.step for report in stopped.steps] == [4, 5]
    checkpoints = checkpoints_of(place)
    shutil.rmtree(place / "checkpoints" / "branch-0002" / step_directory_name(5))
    assert candidates(checkpoints)[0].step == 3
    again = jobs.run(rare, CaseOrders(rollback=BACK, stop_at=(0, 5)))
    assert [report.step for report in again.steps] == [4, 5, 6]
    assert again.losses[:2] == stopped.losses
    assert len(list_branches(checkpoints)) == 2
    rest = jobs.run(rare)
    assert [report.step for report in rest.steps] == [7, 8]
    assert again.losses + rest.losses == oracle.losses


@pytest.mark.slow
def test_rollback_before_the_first_checkpoint_starts_fresh(
    jobs: TrainingJobs, train_data: Tables, trained: tuple[Path, Run], tmp_path: Path
) -> None:
    place = copied(trained, tmp_path)
    early = Rollback("incident-2", to_step=2, skip_from=4, skip_to=5)
    after = jobs.run(make_config(*tables(train_data, place)), CaseOrders(rollback=early, stop_at=(0, 1)))
    shutil.rmtree(place / "checkpoints" / "branch-0002" / step_directory_name(2))
    rest = jobs.run(make_config(*tables(train_data, place)))
    assert [report.step for report in rest.steps] == list(range(1, STEPS + 1))
    from_the_beginning = never_had(jobs, train_data, tmp_path, "")
    assert after.losses == from_the_beginning.losses[:2]
    assert rest.losses == from_the_beginning.losses


def test_rollback_to_a_missing_checkpoint_is_reported(
    jobs: TrainingJobs, train_data: Tables, trained: tuple[Path, Run], tmp_path: Path
) -> None:
    place = copied(trained, tmp_path)
    shutil.rmtree(place / "checkpoints" / "main" / step_directory_name(3))
    with pytest.raises(RankError, match="went wrong after step 4, and the oldest checkpoint left is of step 6; keep"):
        jobs.run(make_config(*tables(train_data, place)), CaseOrders(rollback=BACK))
    assert [candidate.step for candidate in candidates(checkpoints_of(place))] == [8, 6]
