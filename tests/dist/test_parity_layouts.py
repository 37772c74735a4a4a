"""Every layout computes what one process computes: all powers of two of (tp, pp, dp) on up to 8 ranks, in fp64."""

from __future__ import annotations

import pytest

from tests.dist.training_jobs import Tables, TrainingJobs, assert_bitwise, assert_close, assert_parity
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
"""Rounding makes 1e-16 an operation, and some 1e-13 after 5 steps; a wrong factor, sum or order makes 1e-4 and more."""


def powers_of_two(max_ranks: int) -> list[tuple[int, int, int, int]]:
    """Return all (tp, pp, dp, chunks) of powers of two with tp * pp * dp up to `max_ranks`.

    Two chunks on one stage are the same whatever is beside them: of those there are a few.
    """
    sizes = [2**power for power in range(max_ranks.bit_length())]
    return [
        (tp, pp, dp, chunks)
        for tp in sizes
        for pp in sizes
        for dp in sizes
        for chunks in (1, 2)
        if tp * pp * dp <= max_ranks and (chunks == 1 or pp > 1 or tp * dp in (2, 4))
    ]


LAYOUTS = powers_of_two(8)


def test_the_matrix_is_whole() -> None:
    assert len(LAYOUTS) == 35


@pytest.mark.slow(kept=["tp2-pp2-dp2-chunks2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}-pp{}-dp{}-chunks{}".format(*layout))
def test_layout_gives_the_numbers_of_one_process(
    layout: tuple[int, int, int, int], jobs: TrainingJobs, all_data: Tables
) -> None:
    tp, pp, dp, chunks = layout
    # one layer a chunk where there are many of them; a reference for each depth
    model = {"model": {"num_layers": max(2, pp * chunks)}}
    # the schedules of one chunk take turns
    schedule = "gpipe" if LAYOUTS.index(layout) % 2 else "1f1b"
    reference = jobs.remembered(make_config(all_data, model))
    run = jobs.run(make_config(all_data, model, on_layout(tp, pp, dp, chunks, schedule)))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert run.evaluation.num_tokens == reference.evaluation.num_tokens == 201
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")
    # what was compared is no standstill
    assert run.losses[-1] < run.losses[0]
