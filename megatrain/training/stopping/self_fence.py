"""Decides whether a worker must end because its executor may be frozen and cannot end it (ADR 0036).

The watchdog process polls every half second. The black box has all facts for the decision: the executor's control page
has the time until which the lease is valid and the round that the executor has reached, and the worker's own records
show its progress. Without an executor no process writes that page, and no worker is ended. Standard library only,
because this module is loaded before torch.
"""

from __future__ import annotations

import time
from pathlib import Path

from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.black_box.values import ControlPage, Progress
from megatrain.fencing.fence import FenceAction, FenceRule, LeaseView, fence, step_silence

_NS = 1_000_000_000


class SelfFence:
    """Follows the black box of one worker. Raises: DataError when the black box cannot be read."""

    def __init__(self, path: Path, rule: FenceRule) -> None:
        self._reader = BlackBoxReader(path)
        self._rule = rule
        self._suspected = FenceAction.GO_ON

    def poll(self) -> tuple[FenceAction, str]:
        """Return the action for the worker, and its reason.

        An action needs the same result in two successive polls. By the second, a live executor has acted, and a machine
        that was only delayed has made progress.
        """
        control = self._reader.control()
        action, reason = FenceAction.GO_ON, ""
        if control is not None:
            action, reason = self._judge(control, self._reader.progress())
        is_sure, self._suspected = action is self._suspected, action
        return (action, reason) if is_sure else (FenceAction.GO_ON, "")

    def _judge(self, control: ControlPage, progress: Progress) -> tuple[FenceAction, str]:
        own = self._reader.identity
        return worker_action(control, progress, self._rule, own.round, own.rank, time.monotonic_ns())


def worker_action(
    control: ControlPage, progress: Progress, rule: FenceRule, own_round: int, rank: int, now_ns: int
) -> tuple[FenceAction, str]:
    """Return the action for a worker of `own_round`, from its black box only, and its reason."""
    if control.lease_ok_until_ns == 0:
        return FenceAction.GO_ON, ""
    if control.round > own_round:
        return FenceAction.STOP, (
            f"this host fenced itself: it has reached round {control.round}, and this worker belongs to round "
            f"{own_round}"
        )
    lease = LeaseView((now_ns - control.lease_ok_until_ns) / _NS)
    limits = rule.deadlines(control.interval_ns / _NS, control.stop_ns / _NS)
    return fence(limits, lease, step_silence({rank: progress}, now_ns))
