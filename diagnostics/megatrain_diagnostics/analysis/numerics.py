"""Raises an alarm if loss or gradient norm is not finite, or many times its median (MegaScale, ByteRobust: 5 times).

The median is over the newest values that were finite and no jump. A spike of the gradient norm in one step is handled
by clipping, so a certain alarm needs a jump that lasts, or a loss that rises too. All ranks report the same numbers; a
rank with different numbers is outvoted, because a job must not roll back for corrupt memory of one rank.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import StepValue
from megatrain_diagnostics.analysis.confirmed_steps import ConfirmedSteps
from megatrain_diagnostics.events.tables import Values, select

NUM_REMEMBERED = 100
NUM_NEEDED = 50
"""Number of finite values that are needed before a jump can be detected."""
_LASTING = 2
"""Number of steps that a jump of the gradient norm must last."""
_WITH_LOSS = 1.5
"""If the loss is this many times its median, a jump of the gradient norm is certain at once."""
_MAX_VOTES = 5
"""Limit of the ranks whose values are compared for a step: enough to outvote one rank."""
_MAX_WAITING = 1_000
"""Limit of the steps that wait for the report of a second rank; later ones are dropped as invalid."""


@dataclass(frozen=True, slots=True)
class NumericsAlarm:
    """An alarm. Steps are numbered as in the recorder: step s starts from the checkpoint of step s.

    `rollback_to`: the step of the newest checkpoint that is not suspect, which is the state after that many steps.
    """

    first_step: int
    last_step: int
    rollback_to: int
    is_certain: bool
    evidence: tuple[str, ...]


class NumericsWatch:
    """Watches one round. Several ranks may report a step's values, in any order and repeatedly. Steps come in order."""

    def __init__(self, jump_factor: float, num_ranks: int = 1) -> None:
        self._factor = jump_factor
        self._past: dict[int, deque[float]] = {
            kind: deque(maxlen=NUM_REMEMBERED) for kind in (StepValue.LOSS, StepValue.GRAD_NORM)
        }
        self._confirmed = ConfirmedSteps(num_ranks)
        self._waiting: dict[int, dict[int, dict[int, float]]] = {}
        """Step -> kind -> rank -> value."""
        self._judged = -1
        self._first_bad: int | None = None
        self._num_bad = 0

    def add(self, values: Values) -> tuple[NumericsAlarm, ...]:
        """Add values and return new alarms.

        A confirmed step is checked when a later step is confirmed, or when enough ranks agree on both numbers.
        """
        if self._factor <= 0.0:
            return ()
        chosen = select(values, np.isin(values.kind, list(self._past)) & (values.step > self._judged))
        self._confirmed.add(chosen.rank, chosen.step)
        for step, kind, rank, value in _some_of_each(chosen):
            votes = self._waiting.setdefault(step, {}).setdefault(kind, {})
            if len(votes) < _MAX_VOTES:
                votes[rank] = value
        for step in sorted(self._waiting)[_MAX_WAITING:]:
            del self._waiting[step]
        return tuple(self._judge())

    def _judge(self) -> Iterable[NumericsAlarm]:
        confirmed = self._confirmed.newest
        for step in sorted(step for step in self._waiting if step <= confirmed):
            if step == confirmed and not self._is_agreed(self._waiting[step]):
                return
            alarm = self._judge_step(step, {kind: _elected(votes) for kind, votes in self._waiting.pop(step).items()})
            self._judged = step
            if alarm is not None:
                yield alarm

    def _is_agreed(self, found: dict[int, dict[int, float]]) -> bool:
        """Return whether enough ranks report both numbers, and all report the same."""
        needed = self._confirmed.num_needed
        return len(found) == len(self._past) and all(
            len(votes) >= needed and len(set(map(repr, votes.values()))) == 1 for votes in found.values()
        )

    def _judge_step(self, step: int, found: dict[int, float]) -> NumericsAlarm | None:
        sentences, kinds, is_nan = [], set(), False
        for kind, value in found.items():
            name = StepValue(kind).text
            if not math.isfinite(value):
                sentences.append(f"{name} of step {step} is not finite ({value})")
                kinds.add(kind)
                is_nan = True
            elif self._is_jump(kind, value):
                usual = float(np.median(self._past[kind]))
                sentences.append(
                    f"{name} of step {step} is {value:.4g}, {value / usual:.1f} times the median {usual:.4g} of "
                    f"{len(self._past[kind])} earlier steps"
                )
                kinds.add(kind)
            else:
                self._past[kind].append(value)
        if not kinds:
            self._first_bad, self._num_bad = None, 0
            return None
        self._first_bad = step if self._first_bad is None else self._first_bad
        self._num_bad += 1
        is_certain = is_nan or StepValue.LOSS in kinds or self._num_bad >= _LASTING or self._has_loss_risen(found)
        # the loss is computed with the weights before its step, which the previous step may have damaged
        begin = self._first_bad - (1 if StepValue.LOSS in kinds and not is_nan else 0)
        begin = max(0, begin)
        return NumericsAlarm(self._first_bad, step, begin, is_certain, tuple(sentences))

    def _is_jump(self, kind: int, value: float) -> bool:
        past = self._past[kind]
        if len(past) < NUM_NEEDED:
            return False
        usual = float(np.median(past))
        return usual > 0.0 and value > self._factor * usual

    def _has_loss_risen(self, found: dict[int, float]) -> bool:
        past = self._past[StepValue.LOSS]
        loss = found.get(StepValue.LOSS)
        return loss is not None and len(past) >= NUM_NEEDED and loss > _WITH_LOSS * float(np.median(past))


def _some_of_each(values: Values) -> Iterator[tuple[int, int, int, float]]:
    """Yield (step, kind, rank, value) of at most five ranks per step and kind."""
    order = np.lexsort((values.kind, values.step))
    keys = values.step[order].astype(np.int64) << 8 | values.kind[order]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    rows = order[np.arange(len(order)) - first[place] < _MAX_VOTES]
    columns = (values.step, values.kind, values.rank, values.value)
    yield from zip(*(column[rows].tolist() for column in columns), strict=True)


def _elected(votes: dict[int, float]) -> float:
    """Return the value that most ranks report; in a tie a NaN or infinity, or else the greatest value."""
    count = Counter(map(repr, votes.values()))  # as text: a NaN is not equal to itself
    return max(votes.values(), key=lambda value: (count[repr(value)], not math.isfinite(value), value))
