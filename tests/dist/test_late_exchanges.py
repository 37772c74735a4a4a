"""Random exchanges come late: no result is used early, no rank waits for ever, and no bit changes.

tests/faults/test_many_late_exchanges.py has more of these.
"""

from __future__ import annotations

import pytest

from tests.helpers.late_exchanges import LATE_CASES, assert_late_changes_nothing
from tests.helpers.rank_pool import RankPool


@pytest.mark.slow(kept=["pp4-zero-bubble"])
@pytest.mark.parametrize("name", LATE_CASES)
def test_late_exchanges_change_no_bit(name: str, rank_pool: RankPool) -> None:
    assert_late_changes_nothing(rank_pool, LATE_CASES[name], range(2))
