"""The batch-size ramp-up: Megatron-LM's rule, and its sequence of levels."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config import BatchConfig, BatchSchedule, rampup_levels


def test_constant_batch() -> None:
    batch = BatchConfig(global_batch_size=48)
    assert rampup_levels(batch) == (48,)
    assert [BatchSchedule(batch).size_at(consumed) for consumed in (0, 1, 10**9)] == [48, 48, 48]


def test_each_level_of_a_ramp_up_lasts_an_equal_share() -> None:
    batch = BatchConfig(global_batch_size=48, rampup_start=16, rampup_increment=8, rampup_samples=100)
    assert tuple(rampup_levels(batch)) == (16, 24, 32, 40, 48)
    consumed = [0, 24, 25, 49, 50, 74, 75, 99, 100, 10**12]
    assert [BatchSchedule(batch).size_at(one) for one in consumed] == [16, 16, 24, 24, 32, 32, 40, 40, 48, 48]


@settings(derandomize=True)
@given(
    start=st.integers(1, 50),
    increment=st.integers(1, 50),
    num_increments=st.integers(1, 20),
    samples=st.integers(1, 5000),
    consumed=st.integers(0, 6000),
)
def test_rule_of_megatron(start: int, increment: int, num_increments: int, samples: int, consumed: int) -> None:
    full = start + increment * num_increments
    batch = BatchConfig(global_batch_size=full, rampup_start=start, rampup_increment=increment, rampup_samples=samples)
    found = BatchSchedule(batch).size_at(consumed)

    # In exact arithmetic: floor(consumed / (samples / num_increments)) increments, at most all of them.
    assert found == min(full, start + increment * (consumed * num_increments // samples))
    assert found in rampup_levels(batch)
