"""Two hundred cases of schedule, layout and late exchanges: no deadlock, and the same bits (see tests/dist)."""

from __future__ import annotations

import pytest

from tests.helpers.late_exchanges import LATE_CASES, assert_late_changes_nothing
from tests.helpers.rank_pool import RankPool

NUM_CASES = 200


@pytest.mark.parametrize("name", LATE_CASES)
def test_late_exchanges_change_no_bit(name: str, rank_pool: RankPool) -> None:
    num_seeds = -(-NUM_CASES // len(LATE_CASES))
    assert_late_changes_nothing(rank_pool, name, range(100, 100 + num_seeds), timeout_s=120.0)
