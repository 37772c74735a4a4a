"""The figures of the jitter benchmark: a pause in one step of fifty is in the 99th percentile, a rarer one is not."""

from __future__ import annotations

import pytest

from benchmarks.jitter import figures


def test_only_frequent_pauses_raise_the_99th_percentile() -> None:
    for every, is_seen in ((50, True), (1000, False)):
        found = figures([0.5 if step % every == every - 1 else 0.1 for step in range(1000)])
        assert found["steps"] == 1000
        assert found["p50 ms"] == pytest.approx(100.0)
        assert found["p99 / p50"] == pytest.approx(5.0 if is_seen else 1.0), every
        assert found["longest ms"] == pytest.approx(500.0)
