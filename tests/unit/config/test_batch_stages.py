"""Sizes of batches step by step: stages compared with a direct computation, and Megatron-LM's ramp-up."""

from __future__ import annotations

from itertools import filterfalse, islice
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage, rampup_levels
from megatrain.config.changes import training_changes
from megatrain.config.load import load_config
from megatrain.contracts.sample_ranges import SampleRanges, merged
from tests.helpers.notification_topics import config_with
from tests.unit.config.conftest import ProblemsOf, Rules, assert_refused, assert_rules

RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=4).map(merged)
SCHEDULES = st.builds(
    lambda start, increment, levels, samples, stages: BatchSchedule(
        BatchConfig(
            global_batch_size=start + increment * levels,
            rampup_start=start,
            rampup_increment=increment,
            rampup_samples=samples,
        )
        if samples
        else BatchConfig(global_batch_size=start),
        tuple(BatchStage(samples + first, size) for first, size in sorted(stages.items())),
    ),
    start=st.integers(1, 12),
    increment=st.integers(1, 7),
    levels=st.integers(1, 6),
    samples=st.sampled_from([0, 1, 30, 100]),
    stages=st.dictionaries(st.integers(1, 200), st.integers(1, 40), max_size=4),
)
TWO_STAGES = BatchSchedule(BatchConfig(global_batch_size=8), (BatchStage(20, 4), BatchStage(32, 16)))


def walked(schedule: BatchSchedule, cursor: int, num_steps: int, skipped: SampleRanges) -> list[tuple[int, int]]:
    """Return (first sample, size) of each step, sample by sample, and the beginning of the step after them: the
    oracle."""
    left_out = {sample for first, end in skipped for sample in range(first, end)}
    kept = filterfalse(left_out.__contains__, range(cursor, 10**6))
    steps = []
    for first in kept:
        batch = schedule.batch
        sizes = [stage.global_batch_size for stage in schedule.stages if stage.first_sample <= first]
        size = batch.global_batch_size
        if first < batch.rampup_samples:
            num_increments = (batch.global_batch_size - batch.rampup_start) // batch.rampup_increment
            size = batch.rampup_start + first * num_increments // batch.rampup_samples * batch.rampup_increment
        steps.append((first, sizes[-1] if sizes else size))
        if len(steps) > num_steps:
            return steps
        next(islice(kept, steps[-1][1] - 1, steps[-1][1] - 1), None)
    raise AssertionError


def test_two_stages_change_the_batch_at_the_next_step() -> None:
    assert list(islice(TWO_STAGES.steps_from(0, ()), 7)) == [
        (0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 16), (48, 16)
    ]  # fmt: skip
    assert TWO_STAGES.num_steps_by_size(7) == {8: 3, 4: 2, 16: 2}
    assert [TWO_STAGES.steps_before(sample) for sample in (0, 1, 20, 24, 25, 32, 33, 480)] == [0, 1, 3, 3, 4, 5, 6, 33]


@settings(derandomize=True)
@given(schedule=SCHEDULES, cursor=st.integers(0, 300), num_steps=st.integers(0, 60), skipped=RANGES)
def test_sizes_of_steps_agree_with_a_walk_over_the_samples(
    schedule: BatchSchedule, cursor: int, num_steps: int, skipped: SampleRanges
) -> None:
    expected = walked(schedule, cursor, num_steps, skipped)
    found = list(islice(schedule.steps_from(cursor, skipped), num_steps + 1))
    assert [size for _, size in found] == [size for _, size in expected]
    # The beginning of the first step is given; all others begin after the skipped samples.
    assert [start for start, _ in found[1:]] == [start for start, _ in expected[1:]]
    assert schedule.cursor_after(cursor, num_steps, skipped) == found[-1][0]

    # A resume may begin at any step: the remaining steps are the same.
    middle = found[num_steps // 2][0]
    assert list(islice(schedule.steps_from(middle, skipped), num_steps - num_steps // 2 + 1)) == found[num_steps // 2 :]


@settings(derandomize=True)
@given(schedule=SCHEDULES, num_steps=st.integers(1, 60), sample=st.integers(0, 400))
def test_steps_of_a_new_run_are_counted(schedule: BatchSchedule, num_steps: int, sample: int) -> None:
    steps = walked(schedule, 0, 500, ())
    sizes = [size for _, size in steps[:num_steps]]
    assert schedule.num_steps_by_size(num_steps) == {size: sizes.count(size) for size in sizes}
    assert schedule.steps_before(sample) == sum(start < sample for start, _ in steps)


RULES: Rules = {
    "fits": (["--data_stage.after_tokens=640", "--data_stage.global_batch_size=96"], None),
    "indivisible": (
        ["--batch.micro_batch_size=4", "--data_stage.after_tokens=640", "--data_stage.global_batch_size=50"],
        ("data_stage.global_batch_size=50 must be divisible by batch.micro_batch_size=4; use 48 or 52 ("
         "--data_stage.global_batch_size on the command line)"),
    ),
    "negative": (
        ["--data_stage.after_tokens=640", "--data_stage.global_batch_size=-1"],
        ("data_stage.global_batch_size=-1 is out of range; use a value >= 0 and <= 100000000 ("
         "--data_stage.global_batch_size on the command line)"),
    ),
    "beginning": (
        ["--data_stage.global_batch_size=96"],
        ("data_stage.after_tokens=0 is the beginning of the run, for which data_source.weight, "
         "batch.global_batch_size and data.seq_len apply; set these, or a number above 0 "
         "(--data_stage.global_batch_size on the command line)"),
    ),
    "nothing": (
        ["--data_stage.after_tokens=640"],
        ("data_stage.after_tokens=640 does nothing without data_stage.weights, data_stage.global_batch_size or "
         "data_stage.seq_len; set one, or remove it (--data_stage.after_tokens on the command line)"),
    ),
    "same sample": (
        [
            *("--data_stage.after_tokens=640", "--data_stage.global_batch_size=96"),
            *("--data_stage-2.after_tokens=639", "--data_stage-2.global_batch_size=24"),
        ],
        ("data_stage-2.after_tokens=639 begins in the same sample as [data_stage] (samples have 64 tokens at "
         "first, and a stage with another length begins with a step); remove one of them, or let it begin later "
         "(--data_stage-2.after_tokens on the command line)"),
    ),
    "pipeline": (
        [
            *("--parallel.pp_size=4", "--parallel.num_chunks=2", "--parallel.schedule=interleaved"),
            *("--data_stage.after_tokens=640", "--data_stage.global_batch_size=2"),
        ],
        ("data_stage.global_batch_size=2 with dp_size=1, which is assumed as the most lenient case: num_microbatches=2 "
         "(data_stage.global_batch_size / (batch.micro_batch_size * dp_size), rounded up) must be at least "
         'parallel.pp_size=4 for parallel.schedule="interleaved", or every change of chunk stalls the pipeline; raise '
         'data_stage.global_batch_size to 4 micro-batches or use schedule="1f1b"; the smallest batch that fills every '
         "pipeline is 4 (--data_stage.global_batch_size on the command line)"),
    ),
    "ramp-up": (
        [
            *("--batch.rampup_start=16", "--batch.rampup_increment=16", "--batch.rampup_samples=100"),
            *("--data_stage.after_tokens=6336", "--data_stage.global_batch_size=96"),
        ],
        ("data_stage.after_tokens=6336 with data_stage.global_batch_size=96 begins during the ramp-up of the batch, "
         "which lasts batch.rampup_samples=100 samples of 64 tokens; use after_tokens of at least 6400, or a "
         "shorter ramp-up (--data_stage.after_tokens on the command line)"),
    ),
    "after the ramp-up": (
        [
            *("--batch.rampup_start=16", "--batch.rampup_increment=16", "--batch.rampup_samples=100"),
            *("--data_stage.after_tokens=6337", "--data_stage.global_batch_size=96"),
        ],
        None,
    ),
}  # fmt: skip


def test_batches_of_stages_that_no_step_can_have_are_refused(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, RULES)


def test_a_stage_may_change_the_batch_alone(tmp_path: Path) -> None:
    stage = '[data]\ntrain = "a"\n[[data_stage]]\nafter_tokens = 321\nglobal_batch_size = 96\n'
    config = config_with(tmp_path, stage)
    assert config.batch_schedule == BatchSchedule(config.batch, (BatchStage(11, 96),))
    other = load_config(tmp_path / "config.toml", ["--data_stage.global_batch_size=48"]).config
    assert [change.key for change in training_changes(config, other)] == ["data_stage.global_batch_size"]
    assert_refused(tmp_path, {stage + "weights = 'a=1'": r"data_stage.weights=.* needs sources with names"})


def test_each_level_of_a_ramp_up_lasts_an_equal_share() -> None:
    batch = BatchConfig(global_batch_size=48, rampup_start=16, rampup_increment=8, rampup_samples=100)
    assert tuple(rampup_levels(batch)) == (16, 24, 32, 40, 48)
    consumed = [0, 24, 25, 49, 50, 74, 75, 99, 100, 10**12]
    assert [BatchSchedule(batch).size_at(one) for one in consumed] == [16, 16, 24, 24, 32, 32, 40, 40, 48, 48]
