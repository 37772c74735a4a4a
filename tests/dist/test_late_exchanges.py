"""Randomly delayed exchanges: no result is used early, no rank waits forever, and no bit changes."""

from __future__ import annotations

import pytest

from tests.helpers.late_exchanges import LATE_CASES, SCHEDULES, assert_late_changes_nothing, random_case
from tests.helpers.rank_pool import RankPool


@pytest.mark.slow(kept=["pp4-zero-bubble"])
@pytest.mark.parametrize("name", LATE_CASES)
def test_late_exchanges_change_no_bit(name: str, rank_pool: RankPool) -> None:
    assert_late_changes_nothing(rank_pool, LATE_CASES[name], range(2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(SCHEDULES)))
def test_late_exchanges_change_no_bit_of_random_layouts(seed: int, rank_pool: RankPool) -> None:
    assert_late_changes_nothing(rank_pool, random_case(seed), range(100 + 2 * seed, 102 + 2 * seed))
