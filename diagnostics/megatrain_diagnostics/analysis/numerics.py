"""Alarms of loss and gradient norm: not a number, or many times what it was (MegaScale, ByteRobust: 5 times).

The measure is the median of the newest finite values. A gradient norm alone may spike for one step, which clipping
takes care of: it has to last, or the loss has to rise with it. All ranks tell the same numbers; one that tells others
is outvoted, for a job must not go back because the memory of one rank is bad.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.step_values import StepValue
from megatrain_diagnostics.analysis.witnesses import Witnesses
from megatrain_diagnostics.events.tables import Values, select

NUM_REMEMBERED = 100
NUM_NEEDED = 50
"""Finite values that are needed before a jump can be detected."""
_LASTING = 2
"""Steps that a jump of the gradient norm must last."""
_WITH_LOSS = 1.5
"""A loss so many times its median makes the jump of a gradient norm serious at once."""
_MOST_VOTES = 5
"""Ranks whose word on a number counts: enough to outvote one, of however many."""
_MOST_WAITING = 1_000
"""Steps that wait for a second witness; steps farther ahead are invalid."""


@dataclass(frozen=True, slots=True)
class NumericsAlarm:
    """Steps are those of the recorder: step s is what follows a checkpoint of step s.

    `rollback_to` is the number of a checkpoint: the state after so many steps.
    """

    first_step: int
    last_step: int
    rollback_to: int
    is_certain: bool
    evidence: tuple[str, ...]


class NumericsWatch:
    """One round. Values may come from several ranks, twice and in any order of ranks; steps in order."""

    def __init__(self, jump_factor: float, num_ranks: int = 1) -> None:
        self._factor = jump_factor
        self._past: dict[int, deque[float]] = {
            kind: deque(maxlen=NUM_REMEMBERED) for kind in (StepValue.LOSS, StepValue.GRAD_NORM)
        }
        self._witnesses = Witnesses(num_ranks)
        self._waiting: dict[int, dict[int, dict[int, float]]] = {}
        """Step -> kind -> rank -> value."""
        self._judged = -1
        self._first_bad: int | None = None
        self._num_bad = 0

    def add(self, values: Values) -> tuple[NumericsAlarm, ...]:
        """Return the alarms that new values raise.

        A confirmed step (see `Witnesses`) is judged when a later one is confirmed, or when ranks agree on both numbers.
        """
        if self._factor <= 0.0:
            return ()
        chosen = select(values, np.isin(values.kind, list(self._past)) & (values.step > self._judged))
        self._witnesses.add(chosen.rank, chosen.step)
        for step, kind, rank, value in _some_of_each(chosen):
            votes = self._waiting.setdefault(step, {}).setdefault(kind, {})
            if len(votes) < _MOST_VOTES:
                votes[rank] = value
        for step in sorted(self._waiting)[_MOST_WAITING:]:
            del self._waiting[step]
        return tuple(self._judge())

    def _judge(self) -> Iterable[NumericsAlarm]:
        believed = self._witnesses.believed
        for step in sorted(step for step in self._waiting if step <= believed):
            if step == believed and not self._is_agreed(self._waiting[step]):
                return
            alarm = self._judge_step(step, {kind: _elected(votes) for kind, votes in self._waiting.pop(step).items()})
            self._judged = step
            if alarm is not None:
                yield alarm

    def _is_agreed(self, found: dict[int, dict[int, float]]) -> bool:
        """Whether enough ranks report the same numbers, and no rank reports others."""
        needed = self._witnesses.num_needed
        return len(found) == len(self._past) and all(
            len(votes) >= needed and len(set(map(repr, votes.values()))) == 1 for votes in found.values()
        )

    def _judge_step(self, step: int, found: dict[int, float]) -> NumericsAlarm | None:
        said, kinds, is_nan = [], set(), False
        for kind, value in found.items():
            name = StepValue(kind).text
            if not math.isfinite(value):
                said.append(f"{name} of step {step} is no number ({value})")
                kinds.add(kind)
                is_nan = True
            elif self._is_jump(kind, value):
                usual = float(np.median(self._past[kind]))
                said.append(
                    f"{name} of step {step} is {value:.4g}, {value / usual:.1f} times the median {usual:.4g} of the "
                    f"{len(self._past[kind])} steps before"
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
        # a loss is that of the weights before its step: what spoilt them may have been the batch before
        begin = self._first_bad - (1 if StepValue.LOSS in kinds and not is_nan else 0)
        begin = max(0, begin)
        return NumericsAlarm(self._first_bad, step, begin, is_certain, tuple(said))

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
    """Yield step, kind, rank and value of as many rows of each step and kind as may vote: of 12,288 ranks a few."""
    order = np.lexsort((values.kind, values.step))
    keys = values.step[order].astype(np.int64) << 8 | values.kind[order]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    rows = order[np.arange(len(order)) - first[place] < _MOST_VOTES]
    columns = (values.step, values.kind, values.rank, values.value)
    yield from zip(*(column[rows].tolist() for column in columns), strict=True)


def _elected(votes: dict[int, float]) -> float:
    """Return the value that most ranks tell; of several the worst: what is no number, or the greatest."""
    count = Counter(map(repr, votes.values()))  # as text: a NaN is not equal to itself
    return max(votes.values(), key=lambda value: (count[repr(value)], not math.isfinite(value), value))
