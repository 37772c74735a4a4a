"""Which checkpoint a start loads: the order of sources, and the rules of a rollback."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.continued_stream import continued_stream
from megatrain.checkpoint.start import StartingPoint, StorageCandidate, pending_rollback, read_storage, rollback_start
from megatrain.checkpoint.start_order import first_order, known_order, samples_to_skip
from megatrain.checkpoint_format.lineage import open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, TopologyError
from megatrain.contracts.process import ROLLBACK_VARIABLE, process_from_environment
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import MAX_SKIPPED_STEPS, Rollback
from megatrain.contracts.sample_ranges import SampleRanges
from tests.helpers.checkpoint_tree import put_checkpoint, put_main
from tests.helpers.single_rank import simulated_group

CONFIG = Config.from_dict(
    {
        "model": {"vocab_size": 90, "seq_len": 16, "hidden_size": 32, "num_layers": 1, "num_heads": 4},
        "batch": {"global_batch_size": 8},
        "train": {"steps": 200},
        "optimizer": {"lr": 1e-3},
    }
)


def mixed(*stages: tuple[int, tuple[int, int]]) -> SampleStream:
    sources = (StreamSource("web", 5000, "a" * 32), StreamSource("code", 3000, "b" * 32))
    return SampleStream(7, sources, tuple(MixtureStage(*stage, 16) for stage in stages))


def stages_of(stream: SampleStream) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((stage.first_sample, stage.weights) for stage in stream.stages)


OLD = (0, (1, 1))
CHANGED = (336, (1, 3))
"""The mixture that the run had from step 42 on."""
PLAN = (416, (2, 5))
"""The mixture of the next start, after the samples that the branch skips."""
OPENED = replace(mixed(OLD, CHANGED, (800, (1, 0))), skipped=((400, 416),))
"""The order of the branch, with a stage that was only planned."""
NOW = mixed((0, (2, 5)))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Location:
    """Return the checkpoints of a run that went back to step 40."""
    checkpoints = LocalLocation(tmp_path)
    main = put_main(checkpoints)
    for step in (30, 40):
        put_checkpoint(main, step, consumed_samples=8 * step, data=mixed(OLD))
    open_branch(checkpoints, "main", 40, "back", rollback="i-1", data=OPENED)
    return checkpoints


def started(checkpoints: Location) -> StartingPoint:
    return read_storage(checkpoints, CheckpointConfig(), 0, CpuGroups({}, (), simulated_group("dp", 1, 0)))


@dataclass(frozen=True)
class OrderCase:
    """A start: from a step, with the mixture of a configuration, and the expected stages and skips."""

    step: int
    stages: tuple[tuple[int, tuple[int, int]], ...]
    skipped: SampleRanges = OPENED.skipped
    now: SampleStream = NOW
    rollback: Rollback | None = None


CASES = {
    "with another plan": OrderCase(40, (OLD, CHANGED, PLAN)),
    "with the same plan": OrderCase(40, (OLD, CHANGED), now=mixed((0, (1, 3)))),
    "from an older checkpoint": OrderCase(30, (OLD, CHANGED, PLAN)),
    "back to the same step again": OrderCase(
        40, (OLD, CHANGED, PLAN), ((400, 416), (432, 448)), rollback=Rollback("i-2", 40, 52, 53)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_branch_without_a_checkpoint_keeps_its_order(checkpoints: Location, case: OrderCase) -> None:
    progress = TrainingProgress(case.step, 8 * case.step)
    known = known_order(started(checkpoints), mixed(OLD), case.now, CONFIG, case.rollback, progress)
    found = continued_stream(known, case.now, progress.consumed_samples)
    assert (found.problem, stages_of(found.stream)) == ("", case.stages)
    assert found.stream.skipped == case.skipped


def test_checkpoint_of_the_branch_has_the_newest_order(checkpoints: Location) -> None:
    newest = replace(mixed(OLD, CHANGED, PLAN), skipped=OPENED.skipped)
    put_checkpoint(checkpoints / "branch-0002", 45, round=4, consumed_samples=360, data=newest)
    start = started(checkpoints)
    assert (start.stream, start.consumed_samples) == (newest, 360)


@pytest.mark.parametrize("first_sample", [0, 240])
def test_branch_at_the_begin_of_a_run_keeps_its_order(tmp_path: Path, first_sample: int) -> None:
    """The run began at sample 0, or in the order of another run's checkpoint."""
    checkpoints = LocalLocation(tmp_path)
    put_checkpoint(put_main(checkpoints), 60, consumed_samples=480, data=mixed(OLD))
    open_branch(checkpoints, "main", 0, "back", rollback="i-1", data=OPENED)
    start, progress = started(checkpoints).begun_at(first_sample), TrainingProgress(first_sample // 8, first_sample)
    assert start.candidates == ()

    found = first_order(start, NOW, NOW, CONFIG, None, progress)
    assert (stages_of(found.stream), found.stream.skipped) == ((OLD, CHANGED, PLAN), OPENED.skipped)
    again = Rollback("i-2", progress.step, progress.step + 20, progress.step + 20)
    left_out = first_order(start, NOW, NOW, CONFIG, again, progress).stream
    assert stages_of(left_out) == (OLD, CHANGED, PLAN)
    other = replace(NOW, seed=8)
    assert "data.seed is 8" in first_order(start, other, other, CONFIG, None, progress).problem


def test_order_of_a_run_without_a_branch_is_the_plan() -> None:
    start = StartingPoint("main", 0.0, (), -1, (), ())
    assert first_order(start, NOW, OPENED, CONFIG, None, TrainingProgress()).stream == NOW


def at_step_42(rollback: Rollback | None) -> SampleStream:
    """Return the order of a job whose newest checkpoint is that of step 42, with a plan that has changed since then."""
    start = StartingPoint("main", 0.0, (), 1, (), (), stream=mixed(OLD), consumed_samples=336)
    return known_order(start, mixed(OLD), mixed((0, (1, 3))), CONFIG, rollback, TrainingProgress(42, 336))


def test_rollback_to_the_newest_checkpoint_keeps_the_new_mixture() -> None:
    found = at_step_42(Rollback("i-1", 42, 43, 44))
    assert (stages_of(found), found.skipped) == ((OLD, CHANGED), ((344, 360),))
    # Without a rollback the resume itself begins the stage, and reports it.
    assert stages_of(at_step_42(None)) == (OLD,)


BACK = Rollback("incident-1", 40, 41, 43)
BATCH = BatchSchedule(BatchConfig(global_batch_size=8))
WORKER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def start(*steps: int, is_own: bool = True, rollbacks: tuple[str, ...] = ()) -> StartingPoint:
    found = tuple(StorageCandidate("main", step, f"step-{step}", is_own) for step in steps)
    return StartingPoint("main", 0.0, found, 1, (), (), rollbacks)


def test_a_rollback_is_pending_until_the_lineage_has_it() -> None:
    assert pending_rollback(None, start(50)) is None
    assert pending_rollback(BACK, start(50)) == BACK
    assert pending_rollback(BACK, start(50, rollbacks=("incident-0",))) == BACK
    assert pending_rollback(BACK, start(50, rollbacks=("incident-2", "incident-1"))) is None


def test_checkpoints_that_qualify_for_rollback() -> None:
    cases: list[tuple[tuple[int, ...], int, list[int]]] = [
        ((50, 40, 30), 10, [40, 30]), ((50, 41), 50, []), ((39,), 10, [39]), ((), 10, []), ((), 0, []),
    ]  # fmt: skip
    for steps, interval, expected in cases:
        found = rollback_start(start(*steps), BACK, CheckpointConfig(interval=interval))
        assert [candidate.step for candidate in found.candidates] == expected, (steps, interval)


def test_removed_checkpoint_is_not_the_beginning_of_a_run() -> None:
    message = "after step 40, and the oldest checkpoint left is of step 50; keep more"
    for settings in (CheckpointConfig(interval=40), CheckpointConfig(), CheckpointConfig(interval=50, load="x")):
        with pytest.raises(CheckpointError, match=message):
            raise AssertionError(f"{settings}: {rollback_start(start(60, 50), BACK, settings)}")


def test_skipped_samples_keep_the_mixture_that_read_them() -> None:
    """The mixture changed at step 42 (sample 336), and no checkpoint was written after that."""
    newest = replace(start(42, 40), stream=mixed(OLD), consumed_samples=336)
    found = known_order(newest, mixed(OLD), mixed((0, (1, 3))), CONFIG, BACK, TrainingProgress(40, 320))
    assert (stages_of(found), found.skipped) == ((OLD, CHANGED), ((328, 352),))


def test_another_runs_checkpoint_is_before_all_that_this_run_did() -> None:
    assert [
        candidate.step for candidate in rollback_start(start(900, is_own=False), BACK, CheckpointConfig()).candidates
    ] == [900]


def test_samples_to_skip_are_those_of_the_steps() -> None:
    cases: list[tuple[TrainingProgress, SampleRanges, tuple[int, int]]] = [
        (TrainingProgress(40, 320), (), (328, 352)),
        (TrainingProgress(41, 328), (), (328, 352)),
        (TrainingProgress(0, 0), (), (328, 352)),
        # Samples that were skipped before have shifted all later steps.
        (TrainingProgress(0, 0), ((0, 16),), (344, 368)),
        (TrainingProgress(40, 320), ((322, 330),), (336, 360)),
        # A batch that surrounds them is skipped as a whole.
        (TrainingProgress(40, 320), ((340, 350),), (328, 362)),
    ]
    for progress, skipped, expected in cases:
        assert samples_to_skip(BACK, progress, BATCH, skipped) == (expected,), (progress, skipped)


def test_samples_to_skip_in_a_ramp_up() -> None:
    ramp = BatchSchedule(BatchConfig(global_batch_size=8, rampup_start=2, rampup_increment=2, rampup_samples=24))
    # batches of 2, 2, 2, 2, 4, 4, 6, 6 (24 consumed after 7), 8
    cursors = [0, 2, 4, 6, 8, 12, 16, 22, 28, 36]
    for first in range(8):
        back = Rollback("i", first, first, first + 1)
        assert samples_to_skip(back, TrainingProgress(), ramp, ()) == ((cursors[first], cursors[first + 2]),)


def test_samples_to_skip_across_a_stage_with_another_batch() -> None:
    stages = BatchSchedule(BatchConfig(global_batch_size=8), (BatchStage(331, 4),))
    # The step at 328 begins before the stage, so it still has 8.
    assert samples_to_skip(BACK, TrainingProgress(40, 320), stages, ()) == ((328, 344),)


def test_job_that_is_past_the_steps_cannot_skip_them() -> None:
    with pytest.raises(CheckpointError, match="step 42 is after step 41"):
        samples_to_skip(BACK, TrainingProgress(42, 336), BATCH, ())


def test_impossible_rollback_is_refused() -> None:
    for steps in ((-1, 0, 0), (5, 4, 6), (3, 4, 3), (0, 0, MAX_SKIPPED_STEPS)):
        with pytest.raises(ValueError, match=re.escape("0 <= to_step <= skip_from <= skip_to")):
            raise AssertionError(f"accepted: {Rollback('i', *steps)}")


def test_a_worker_reads_a_rollback_from_its_environment() -> None:
    assert process_from_environment(WORKER).rollback is None
    assert process_from_environment(WORKER | {ROLLBACK_VARIABLE: ""}).rollback is None
    reported = {ROLLBACK_VARIABLE: encode(BACK).decode()}
    assert process_from_environment(WORKER | reported).rollback == BACK


def test_unreadable_rollback_stops_the_worker() -> None:
    impossible = '{"schema_version":1,"rollback_id":"i","to_step":9,"skip_from":3,"skip_to":4}'
    for text in ("junk", "{}", impossible):
        with pytest.raises(
            TopologyError, match=f"environment variable {ROLLBACK_VARIABLE}.*only .megatrain launch. may set it"
        ):
            process_from_environment(WORKER | {ROLLBACK_VARIABLE: text})
