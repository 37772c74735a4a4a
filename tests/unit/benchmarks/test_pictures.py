"""The benchmark of pictures: both sides decode, and the ratio of their rates has a bar."""

from __future__ import annotations

import pytest

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
