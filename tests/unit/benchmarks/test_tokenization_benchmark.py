"""The benchmark of tokenization: both sides encode the same tokens, and each number of workers has its limit."""

from __future__ import annotations

import os

import pytest

from benchmarks.tokenization import OURS, PEER, WORKERS, run
from tests.helpers.require import require_module

require_module("tokenizers")


@pytest.mark.slow
def test_tokenization_measures_both_sides_by_workers() -> None:
    """`run` refuses sides whose numbers of tokens differ."""
    result = run(text_mb=0.05, num_rounds=1)
    counts = [count for count in WORKERS if count <= len(os.sched_getaffinity(0))]
    found = [(row["workers"], row["side"]) for row in result.rows]
    assert found == [(count, side) for count in counts for side in (OURS, PEER)]
    assert all(row["tokens/s"] > 0 and row["ratio"] > 0 for row in result.rows)
    assert [bar.bar for bar in result.bars] == [">= 0.9"] * len(counts)
