"""Every layout computes what one process computes, in fp64: all powers of two of (tp, pp, dp) on 8 ranks.

Every two sizes of two axes that fit on 8 ranks occur together in one of them, and each size occurs with one chunk and
with two; layouts of fewer ranks add no other combinations.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.dist.training_jobs import (
    TWO_STEPS,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_parity,
)
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
"""Rounding causes 1e-16 per operation, and about 1e-13 after 5 steps; a wrong factor, sum or order causes at least
1e-4."""


def powers_of_two(num_ranks: int) -> list[tuple[int, int, int, int]]:
    """Return all (tp, pp, dp, chunks) of powers of two with tp * pp * dp = `num_ranks`, with two chunks where pp >
    1."""
    sizes = [2**power for power in range(num_ranks.bit_length())]
    return [
        (tp, pp, dp, chunks)
        for tp, pp, dp in product(sizes, repeat=3)
        for chunks in (1, 2)
        if tp * pp * dp == num_ranks and (chunks == 1 or pp > 1)
    ]


# Their sizes occur with one chunk and with two in other layouts.
LEFT_OUT = [(1, 4, 2, 1), (2, 2, 2, 2)]
# and two chunks on one stage, which do not depend on the other sizes
LAYOUTS = [*(layout for layout in powers_of_two(8) if layout not in LEFT_OUT), (2, 1, 2, 2)]


def test_each_size_meets_one_chunk_and_two() -> None:
    of_stages = [layout for layout in LAYOUTS if layout[1] > 1]
    for axis in range(3):
        met = {(layout[axis], layout[3]) for layout in of_stages}
        assert met == set(product({layout[axis] for layout in of_stages}, (1, 2)))


@pytest.mark.slow  # quick: a layout of test_resume.py, one of test_parity_options.py
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}-pp{}-dp{}-chunks{}".format(*layout))
def test_layout_gives_the_numbers_of_one_process(
    layout: tuple[int, int, int, int], jobs: TrainingJobs, all_data: Tables
) -> None:
    tp, pp, dp, chunks = layout
    # one layer a chunk where there are many chunks; a reference for each depth
    model = {"model": {"num_layers": max(2, pp * chunks)}}
    # The schedules of one chunk alternate.
    schedule = "gpipe" if LAYOUTS.index(layout) % 2 else "1f1b"
    reference = jobs.remembered(make_config(all_data, TWO_STEPS, model))
    run = jobs.run(make_config(all_data, TWO_STEPS, model, on_layout(tp, pp, dp, chunks, schedule)))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert run.evaluation.num_tokens == reference.evaluation.num_tokens == 201
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_zero_2_with_a_tied_head_in_another_chunk_of_the_stage(
    overlap: bool, jobs: TrainingJobs, all_data: Tables
) -> None:
    """Two chunks write one gradient: it exists from the backward of the head until that of the embedding."""
    model = {"model": {"num_layers": 2, "has_tied_head": True}}
    reference = jobs.remembered(make_config(all_data, TWO_STEPS, model))
    options = {"parallel": {"zero_stage": 2, "overlap": overlap, "bucket_size": 300}}
    run = jobs.run(make_config(all_data, TWO_STEPS, model, on_layout(1, 1, 2, 2), options))

    assert_parity(run, reference, BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [91, 97])
def test_an_odd_vocabulary_with_a_tied_head_on_two_stages(
    jobs: TrainingJobs, all_data: Tables, vocab_size: int
) -> None:
    """One of two tp ranks has a row of padding, and the first and the last stage have a copy each."""
    model = {"model": {"num_layers": 2, "vocab_size": vocab_size, "vocab_multiple": 2, "has_tied_head": True}}
    reference = jobs.run(make_config(all_data, TWO_STEPS, model))
    run = jobs.run(make_config(all_data, TWO_STEPS, model, on_layout(2, 2, 1)))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")
