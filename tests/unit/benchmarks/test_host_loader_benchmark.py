"""The benchmark of a host's data loader: each layout has its row, and each figure its limit."""

from __future__ import annotations

import pytest

from benchmarks.host_loader import LAYOUTS, run


@pytest.mark.slow
def test_host_loader_measures_each_layout_and_a_kill() -> None:
    result = run(million_documents=0.06, num_sources=3, num_steps=10)
    assert [row["case"] for row in result.rows] == [*LAYOUTS, "8 replicas, loader killed"]
    assert all(row["same stream"] == "yes" and row["loader MB"] > 0 for row in result.rows)
    # on a slow machine, the loader may be a step behind
    assert all(row["read / used"] == pytest.approx(1.0, abs=0.5) for row in result.rows)
    assert [bar.bar for bar in result.bars] == ["<= 2", "<= 300", "<= 1.1", "<= 1.1", "<= 0.5", "yes", "<= 0.01", "yes"]
    assert [bar.found for bar in result.bars if bar.bar == "yes"] == [True, True]
