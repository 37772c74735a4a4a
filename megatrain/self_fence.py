"""Whether a worker must be ended although its executor does not say so, because that one may be frozen (decision 11).

The watchdog process asks about once a second; the one idea is that the black box says it all: the executor's control
page until when the lease is good and which round it has come to, the worker's own words whether it moves. Without an
executor no process writes that page, and nothing is ever ended. Standard library only: this is loaded before torch.
"""

from __future__ import annotations

import time
from pathlib import Path

from megatrain.contracts.black_box import BlackBoxReader
from megatrain.contracts.black_box_values import ControlPage, Progress
from megatrain.failures.fence import FenceRule, FenceStep, LeaseView, fence, step_silence

_NS = 1_000_000_000


class SelfFence:
    """Follows the black box of one worker. Raises: DataError, when that cannot be read."""

    def __init__(self, path: Path, rule: FenceRule) -> None:
        self._reader = BlackBoxReader(path)
        self._rule = rule
        self._suspected = FenceStep.GO_ON

    def look(self) -> tuple[FenceStep, str]:
        """Return what must become of the worker, and why.

        It takes two looks in a row. So an executor that lives acts first, and a machine that was held up has moved on.
        """
        control = self._reader.control()
        step, reason = FenceStep.GO_ON, ""
        if control is not None:
            step, reason = self._judge(control, self._reader.progress())
        is_sure, self._suspected = step is self._suspected, step
        return (step, reason) if is_sure else (FenceStep.GO_ON, "")

    def _judge(self, control: ControlPage, progress: Progress) -> tuple[FenceStep, str]:
        own = self._reader.identity
        return step_of_worker(control, progress, self._rule, own.round, own.rank, time.monotonic_ns())


def step_of_worker(
    control: ControlPage, progress: Progress, rule: FenceRule, own_round: int, rank: int, now_ns: int
) -> tuple[FenceStep, str]:
    """Return what must become of a worker of `own_round`, from its black box alone, and why."""
    if control.lease_ok_until_ns == 0:
        return FenceStep.GO_ON, ""
    if control.round > own_round:
        return FenceStep.STOP, (
            f"this host fenced itself: it has come to round {control.round}, and this worker is of round {own_round}"
        )
    lease = LeaseView((now_ns - control.lease_ok_until_ns) / _NS)
    limits = rule.deadlines(control.interval_ns / _NS, control.stop_ns / _NS)
    return fence(limits, lease, step_silence({rank: progress}, now_ns))
