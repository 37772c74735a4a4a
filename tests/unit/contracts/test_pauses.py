"""The pauses between repeated attempts."""

from __future__ import annotations

from itertools import islice

from megatrain.contracts.pauses import growing_pauses


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(growing_pauses(0.5, 3.0), 6)) == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
