"""Stages with other sample lengths: the beginning of each, compared with a step-by-step computation, and the refused
stages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.batch import BatchConfig, BatchSchedule
from megatrain.config.stages import DataStageConfig, placed_stages, step_begin
from megatrain.contracts.sample_ranges import merged
from tests.unit.config.conftest import ProblemsOf, Rules, assert_rules

STAGES = st.lists(
    st.builds(
        lambda tokens, seq_len, size: DataStageConfig(after_tokens=tokens, seq_len=seq_len, global_batch_size=size),
        st.integers(1, 3000),
        st.sampled_from([0, 2, 4, 16, 64]),
        st.sampled_from([0, 3, 8, 20]),
    ).filter(lambda stage: stage.has_effect),
    max_size=4,
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(stages=STAGES, batch=st.integers(1, 20), seq_len=st.sampled_from([2, 4, 16]))
def test_lengths_change_with_the_first_step_after_their_tokens(
    stages: list[DataStageConfig], batch: int, seq_len: int
) -> None:
    stages = sorted(stages, key=lambda stage: stage.after_tokens)
    placed = placed_stages(stages, BatchConfig(global_batch_size=batch), seq_len)

    # The oracle reads sample by sample; a length may change only between steps, and so may a size.
    sample = token = left = 0
    length, size, ahead = seq_len, batch, list(stages)
    for found in placed:
        stage = ahead.pop(0)
        changes_length = stage.seq_len not in (0, length)
        while token < stage.after_tokens or (changes_length and left):
            if not left:
                # a size of the previous stages that has begun, also within the previous step
                begun = [one for one in placed if one.first_sample <= sample and one.stage.global_batch_size]
                passed = [one for one in begun if one.stage in stages[: len(stages) - len(ahead) - 1]]
                left = passed[-1].stage.global_batch_size if passed else size
            sample, token, left = sample + 1, token + length, left - 1
        length = stage.seq_len or length
        assert (found.first_sample, found.first_token, found.seq_len) == (sample, token, length)
        assert found.changes_length == changes_length


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    size=st.integers(1, 12),
    cursor=st.integers(0, 40),
    distance=st.integers(0, 100),
    skipped=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=3).map(merged),
)
def test_step_begin_splits_no_step(size: int, cursor: int, distance: int, skipped: tuple[tuple[int, int], ...]) -> None:
    sample = cursor + distance
    found = step_begin(BatchSchedule(BatchConfig(global_batch_size=size)), cursor, sample, skipped)
    kept = [n for n in range(cursor, cursor + 1000) if not any(first <= n < end for first, end in skipped)]
    steps = [kept[at : at + size] for at in range(0, len(kept) - size, size)]
    split = [step for step in steps if step[0] < sample <= step[-1]]
    assert all(step[-1] < found or step[0] >= found for step in steps)
    assert (found == sample) == (not split)


STAGE = ("--data_stage.after_tokens=6400", "--data_stage.seq_len=32")
RULES: Rules = {
    "fits": (STAGE, None), "with a batch": ((*STAGE, "--data_stage.global_batch_size=96"), None),
    "parts": ((*STAGE, "--data.block_tokens=64", "--data.part_tokens=640"), None),
    "parts of packed samples": (
        (*STAGE, "--data.part_tokens=640", "--data.packing=best_fit", "--data.has_document_mask=true"), None,
    ),
    "evaluation": (("--evaluation.seq_len=16",), None),
    "first length": (("--data.seq_len=32", "--data_stage.after_tokens=6400", "--data_stage.seq_len=64"), None),
    "too long for the model": (
        ("--data_stage.after_tokens=6400", "--data_stage.seq_len=128"),
        ("data_stage.seq_len=128 must be at most model.seq_len=64, the most tokens of a sample that the model takes; "
         "use 64 or less, or model.seq_len=128 with data.seq_len=64 (--data_stage.seq_len on the command line)"),
    ),
    "evaluation too long": (
        ("--evaluation.seq_len=65",),
        ("evaluation.seq_len=65 must be at most model.seq_len=64, the most tokens of a sample that the model takes; "
         "use 64 or less, or model.seq_len=65 with data.seq_len=64 (--evaluation.seq_len on the command line)"),
    ),
    "indivisible": (
        ("--parallel.tp_size=4", "--data_stage.after_tokens=6400", "--data_stage.seq_len=30"),
        ("data_stage.seq_len=30 must be divisible by parallel.tp_size=4 times parallel.num_sequence_chunks=1; use 28 "
         "or 32 (--data_stage.seq_len on the command line)"),
    ),
    "blocks": (
        (*STAGE, "--data.block_tokens=96", "--data.part_tokens=960", "--data.seq_len=64"),
        ("data.block_tokens=96 must be a multiple of data.seq_len=64, so that no sample crosses a block; use 64 or "
         "128, or another length (--data.block_tokens on the command line)"),
    ),
    "parts of no block": (
        ("--data.block_tokens=64", "--data.part_tokens=100"),
        ("data.part_tokens=100 must be a multiple of data.block_tokens=64; use 64 or 128 "
         "(--data.block_tokens on the command line)"),
    ),
    "blocks without parts": (
        ("--data.block_tokens=64",),
        ("data.block_tokens=64 does nothing with data.part_tokens=0; set both, or use 0 for both "
         "(--data.block_tokens on the command line)"),
    ),
    "blocks of packed samples": (
        ("--data.block_tokens=64", "--data.packing=best_fit", "--data.has_document_mask=true"),
        ('data.block_tokens=64 divides a stream of tokens, and with data.packing="best_fit" a part consists of the '
         "blocks of documents that are packed together; use block_tokens=0 (--data.block_tokens on the command line)"),
    ),
    "offload": (
        (*STAGE, "--parallel.offload_layers=1"),
        ("data_stage.seq_len=32 changes the sample length, but parallel.offload_layers=1 allows one only: which "
         "tensors wait in host memory follows from one length; use parallel.offload_layers=0, or one length for the "
         "whole run (--data_stage.seq_len on the command line)"),
    ),
    "ramp-up": (
        (*STAGE, "--batch.rampup_start=16", "--batch.rampup_increment=16", "--batch.rampup_samples=500"),
        ("data_stage.after_tokens=6400 with data_stage.seq_len=32 begins during the ramp-up of the batch, which lasts "
         "batch.rampup_samples=500 samples of 64 tokens; use after_tokens of at least 32000, or a shorter ramp-up "
         "(--data_stage.after_tokens on the command line)"),
    ),
}  # fmt: skip


def test_lengths_that_no_step_can_have_are_refused(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, RULES)
