"""Alarms of loss and gradient norm: not a number, or many times what it was (MegaScale, ByteRobust: 5 times).

The measure is the median of the newest finite values. A gradient norm alone may spike for one step, which clipping
takes care of: it has to last, or the loss has to rise with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.step_values import StepValue
from megatrain_diagnostics.events.tables import Values

NUM_REMEMBERED = 100
NUM_NEEDED = 50
"""Finite values before a jump can be told."""
_LASTING = 2
"""Steps that a jump of the gradient norm must last."""
_WITH_LOSS = 1.5
"""A loss so many times its median makes the jump of a gradient norm serious at once."""


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
    """One incarnation. Values may come from several ranks, twice and in any order of ranks; steps in order."""

    def __init__(self, jump_factor: float) -> None:
        self._factor = jump_factor
        self._past: dict[int, deque[float]] = {
            kind: deque(maxlen=NUM_REMEMBERED) for kind in (StepValue.LOSS, StepValue.GRAD_NORM)
        }
        self._waiting: dict[int, dict[int, float]] = {}
        self._judged = -1
        self._first_bad: int | None = None
        self._num_bad = 0

    def add(self, values: Values) -> tuple[NumericsAlarm, ...]:
        """Return the alarms that new values raise. Judged is a step when a later one is heard of, or both are known."""
        if self._factor <= 0.0:
            return ()
        chosen = np.isin(values.kind, list(self._past))
        rows = zip(
            values.step[chosen].tolist(), values.kind[chosen].tolist(), values.value[chosen].tolist(), strict=True
        )
        for step, kind, value in rows:
            if step > self._judged:
                known = self._waiting.setdefault(step, {})
                # ranks agree on what is no number; the worst of them counts
                known[kind] = value if not math.isfinite(value) else known.get(kind, value)
        return tuple(self._judge())

    def _judge(self) -> Iterable[NumericsAlarm]:
        for step in sorted(self._waiting):
            if len(self._waiting[step]) < len(self._past) and step == max(self._waiting):
                return
            alarm = self._judge_step(step, self._waiting.pop(step))
            self._judged = step
            if alarm is not None:
                yield alarm

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
