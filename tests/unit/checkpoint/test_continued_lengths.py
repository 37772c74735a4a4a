"""Sample lengths of a run that resumes: past lengths must stay, and a future change begins with a step."""

from __future__ import annotations

from dataclasses import replace

from megatrain.checkpoint.continued_lengths import lengths_problem, with_aligned_lengths
from megatrain.checkpoint.continued_stream import continued_stream
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config import BatchConfig, BatchSchedule, BatchStage
from megatrain.contracts.sample_ranges import SampleRanges

BATCHES = BatchSchedule(BatchConfig(global_batch_size=8), (BatchStage(80, 16),))


def stream(*lengths: tuple[int, int], skipped: SampleRanges = ()) -> SampleStream:
    """Return the stream of one source with these first samples and lengths."""
    stages = tuple(MixtureStage(first, (1,), seq_len) for first, seq_len in lengths)
    return SampleStream(7, (StreamSource("web", 5000, "a" * 32),), stages, skipped)


RECORDED = PLANNED = stream((0, 4), (40, 16))
# (planned, cursor) and a part of the problem, "" for none
PROBLEMS = {
    "as planned": (stream((0, 4), (40, 16)), 48, ""),
    "moved by less than a step": (stream((0, 4), (33, 16)), 48, ""),
    "a later change is added": (stream((0, 4), (40, 16), (48, 4)), 48, ""),
    "a change ahead is removed": (stream((0, 4)), 40, ""),
    "it comes now": (stream((0, 4), (35, 16)), 40, ""),
    "another beginning": (
        stream((0, 8), (40, 16)),
        48,
        "had 4 tokens, and those of the configuration have 8; set data.seq_len=4",
    ),
    "removed": (stream((0, 4)), 48, "by the stages of the configuration: 4 from sample 0 on; restore"),
    "another length": (stream((0, 4), (40, 8)), 48, "have had these tokens: 4 from sample 0 on, 16 from sample 40 on"),
    "too early": (stream((0, 4), (8, 16)), 48, "let others begin after the 288 tokens that the run has read"),
    "later than it was": (stream((0, 4), (41, 16)), 48, "4 from sample 0 on, 16 from sample 41 on"),
    "one more in the past": (stream((0, 4), (20, 8), (40, 16)), 48, "8 from sample 20 on, 16 from sample 40 on"),
}


def test_lengths_of_the_past_must_stay() -> None:
    for case, (planned, cursor, expected) in PROBLEMS.items():
        found = lengths_problem(RECORDED, planned, cursor, 288, BATCHES)
        assert expected in found, (case, found)
        assert bool(found) == bool(expected), (case, found)


def test_samples_left_out_do_not_make_a_change_late() -> None:
    # The step from sample 37 on has the samples 58 to 60, too.
    before = stream((0, 4), (61, 16), skipped=((42, 58),))
    assert before == with_aligned_lengths(replace(before, stages=PLANNED.stages), BATCHES, 37)
    assert not lengths_problem(before, PLANNED, 69, 288, BATCHES)


def test_a_change_before_skipped_samples_must_stay() -> None:
    """Its stage stays in the stream, so the next start would find the difference."""
    before = stream((0, 4), (40, 16), skipped=((56, 64),))
    assert not lengths_problem(before, PLANNED, 24, 96, BATCHES)
    assert "restore seq_len and after_tokens" in lengths_problem(before, stream((0, 4), (200, 16)), 24, 96, BATCHES)


# (lengths, cursor, skipped) and the resulting lengths
ALIGNED: list[tuple[tuple[tuple[int, int], ...], int, SampleRanges, tuple[tuple[int, int], ...]]] = [
    (((0, 4), (40, 16)), 0, (), ((0, 4), (40, 16))),
    (((0, 4), (41, 16)), 0, (), ((0, 4), (48, 16))),
    # 3 samples are skipped, so the steps from 8 on begin at 19, 27, 35, 43.
    (((0, 4), (40, 16)), 8, ((10, 13),), ((0, 4), (43, 16))),
    # A stage that the change passes begins with it.
    (((0, 4), (40, 16), (41, 16)), 8, ((10, 13),), ((0, 4), (43, 16))),
    # Earlier lengths stay.
    (((0, 4), (40, 16)), 43, ((10, 13),), ((0, 4), (40, 16))),
    # No step has samples on both sides of the change.
    (((0, 4), (40, 16)), 8, ((16, 48),), ((0, 4), (40, 16))),
    # The second change replaces the first.
    (((0, 4), (41, 16), (45, 8)), 0, (), ((0, 4), (48, 8))),
    (((0, 4), (81, 16)), 0, (), ((0, 4), (96, 16))),
]


def test_changes_of_the_length_begin_with_steps() -> None:
    for lengths, cursor, skipped, expected in ALIGNED:
        found = with_aligned_lengths(stream(*lengths, skipped=skipped), BATCHES, cursor)
        assert found == stream(*expected, skipped=skipped), (lengths, cursor, skipped)


def test_a_length_is_part_of_the_stage_that_continues() -> None:
    now = stream((0, 4), (35, 16))
    found = continued_stream(stream((0, 4)), now, cursor=40)
    assert found.stream == stream((0, 4), (40, 16))
    assert found.notes == ("from sample 40 on, the mixture is web 100 %, in samples of 16 tokens",)
    ahead = continued_stream(stream((0, 4)), stream((0, 4), (48, 16)), cursor=40)
    assert ahead.stream == stream((0, 4), (48, 16))


def test_a_run_cannot_continue_with_other_parts() -> None:
    before = SampleStream(7, (StreamSource("web", 5000),), (MixtureStage(0, (1,), 4),), block_tokens=8, part_tokens=64)
    found = continued_stream(before, stream((0, 4)), cursor=40)
    assert found.problem == "data.block_tokens and data.part_tokens were (8, 64), and are (0, 0)"
