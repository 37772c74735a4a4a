"""The benchmarks of pictures: both sides decode or train, and the ratio of their figures has a bar."""

from __future__ import annotations

import os

import pytest

from benchmarks import pictures_training
from benchmarks.pictures import OURS, PEER, run
from megatrain.data.pictures.dali_package import find_dali
from tests.helpers.require import require


@pytest.mark.slow
def test_pictures_are_decoded_by_both_sides() -> None:
    require("dali", not find_dali().problem, find_dali().problem)
    result = run(num_rounds=1, round_pictures=32, num_pictures=16)
    assert [row["side"] for row in result.rows] == [OURS, PEER]
    assert all(row["pictures/cpu s"] > 0 and row["ratio"] > 0 for row in result.rows)
    assert [bar.bar for bar in result.bars] == [">= 0.9"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="trainer and producer need a core each")
def test_training_beside_a_producer_has_a_ratio_and_a_bar() -> None:
    cores = os.sched_getaffinity(0)
    result = pictures_training.run(num_blocks=2, block_steps=1, num_pictures=16)
    assert [(row["side"], row["steps"]) for row in result.rows] == [
        (pictures_training.BESIDE, 1), (pictures_training.CACHED, 1),
    ]  # fmt: skip
    assert all(row["step, ms"] > 0 for row in result.rows)
    assert [bar.bar for bar in result.bars] == ["<= 1.03"]
    assert os.sched_getaffinity(0) == cores
