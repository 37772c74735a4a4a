"""The sample order of a starting job: skipped samples are counted in the stages of the mixture that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.continued_stream import continued_stream
from megatrain.checkpoint.start import StartingPoint, read_storage
from megatrain.checkpoint.start_order import first_order, known_order
from megatrain.checkpoint_format.lineage import open_branch
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.config import Config
from megatrain.contracts.records.rounds import Rollback
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
