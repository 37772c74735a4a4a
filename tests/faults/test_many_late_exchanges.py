"""Two hundred random cases of schedule, layout and late exchanges: no deadlock, and the same bits (see tests/dist)."""

from __future__ import annotations

import pytest

from tests.helpers.late_exchanges import assert_late_changes_nothing, random_case
from tests.helpers.rank_pool import RankPool

pytestmark = pytest.mark.slow

NUM_LAYOUTS, DELAYS_EACH = 70, 3


@pytest.mark.parametrize("seed", range(NUM_LAYOUTS))
def test_late_exchanges_change_no_bit(seed: int, rank_pool: RankPool) -> None:
    first = 100 + DELAYS_EACH * seed
    assert_late_changes_nothing(rank_pool, random_case(seed), range(first, first + DELAYS_EACH))
