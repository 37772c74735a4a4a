"""Whether a worker must be ended although its executor does not say so, because that one may be frozen (decision 11).

The watchdog process asks about once a second; the one idea is that the black box says it all: the executor's control
page until when the lease is good and which round it has come to, the worker's own words whether it moves. Without an
executor nobody writes that page, and nothing is ever ended. Standard library only: this is loaded before torch.
"""

from __future__ import annotations

import time
from pathlib import Path

from megatrain.contracts.black_box import BlackBoxReader
from megatrain.contracts.black_box_values import ControlPage, Progress
from megatrain.failures.patience import LeaseView, Patience, fence_reason, find_stall

_NS = 1_000_000_000


class SelfFence:
    """Follows the black box of one worker. Raises: DataError, when that cannot be read."""

    def __init__(self, path: Path, patience: Patience) -> None:
        self._reader = BlackBoxReader(path)
        self._patience = patience
        self._is_suspected = False

    def look(self) -> str:
        """Return why the worker must end, empty while it may go on.

        It takes two looks in a row. So an executor that lives acts first, and a machine that was held up has moved on.
        """
        control = self._reader.control()
        reason = "" if control is None else self._judge(control, self._reader.progress())
        is_sure = self._is_suspected
        self._is_suspected = bool(reason)
        return reason if is_sure else ""

    def _judge(self, control: ControlPage, progress: Progress) -> str:
        own = self._reader.identity
        return reason_to_end(control, progress, self._patience, own.round, own.rank, time.monotonic_ns())


def reason_to_end(
    control: ControlPage, progress: Progress, patience: Patience, own_round: int, rank: int, now_ns: int
) -> str:
    """Return why a worker of `own_round` must end, from its black box alone; empty while it may go on."""
    if control.lease_ok_until_ns == 0:
        return ""
    if control.round > own_round:
        return f"this host fenced itself: it has come to round {control.round}, and this worker is of round {own_round}"
    lease = LeaseView((control.lease_ok_until_ns - now_ns) / _NS)
    return fence_reason(lease, find_stall({rank: progress}, patience, now_ns, time.time()))
