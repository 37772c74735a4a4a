"""The benchmark of data reading: both sides read the samples of every case, and each of our cases has a limit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.data_reading import CASES, run
from benchmarks.data_reading_sides import OURS, PEER
from tests.helpers.require import require


@pytest.mark.slow
def test_data_reading_measures_both_sides_in_each_case() -> None:
    require("megatron-core", find_spec("megatron") is not None, "its data set is the peer")
    result = run(million_tokens=0.3, num_rounds=1, round_samples=64)
    found = [(row["side"], row["documents"] == "yes", row["batch"]) for row in result.rows]
    assert found == [(side, case.has_documents, case.micro_batch_size) for side in (OURS, PEER) for case in CASES[side]]
    assert all(row["samples/s"] > 0 and row["cpu us"] > 0 and row["ratio"] > 0 for row in result.rows)
    assert [bar.bar for bar in result.bars] == [">= 2"] * len(CASES[OURS])
    assert result.settings["tokens"] == 300_000
