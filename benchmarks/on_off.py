"""Steps with telemetry on and off take turns until the ratio of their times is known well enough.

A turn is a block on, two off, and one on, so a steady drift favors neither side. It gives one figure: the logarithm of
the time on over the time off. An interruption of the machine hits both sides alike, so the figures lie symmetrically
about the cost of telemetry. Their mean without the largest and the smallest fifth is the result, with the standard
error of Tukey and McLaughlin (1963). The rule to stop depends on the width of the interval and on the time only, never
on the ratio found (Chow and Robbins, 1965).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

BLOCK = 5
"""Consecutive steps with telemetry on, or off."""
TURN = 4 * BLOCK
"""Steps. Of the ten that are on, one is streamed in full."""
WARMUP = 5 * TURN
"""Steps left out at the beginning."""
SECTION = 20 * TURN
"""Steps from one evaluation of the rule to the next. The last turn of a section is left out, because the evaluation
takes time in it."""
MIN_SECTIONS = 4
MAX_HALF_WIDTH = 0.002
"""The wanted distance from the ratio to the upper bound."""
MAX_S = 360.0
"""The longest measurement of one case, in seconds."""
_CUT = 0.2
_Z_95 = 1.645


def is_on(step: int) -> bool:
    """Return whether telemetry is on in a step."""
    return step // BLOCK % 4 in (0, 3)


def turn_logs(seconds: Sequence[float]) -> list[float]:
    """Return, for each complete turn that counts, the logarithm of its time on over its time off.

    seconds: of all steps, from step 0 on.
    """
    logs = []
    for first in range(WARMUP, len(seconds) - TURN + 1, TURN):
        if (first - WARMUP + TURN) % SECTION == 0:
            continue
        on, off, also_off, also_on = (sum(seconds[at : at + BLOCK]) for at in range(first, first + TURN, BLOCK))
        logs.append(math.log((on + also_on) / (off + also_off)))
    return logs


def ratio_and_half_width(logs: Sequence[float]) -> tuple[float, float]:
    """Return the ratio on / off, and by how much of itself the upper bound of its one-sided 95 % interval is larger."""
    ordered, num_cut = sorted(logs), int(_CUT * len(logs))
    kept = ordered[num_cut : len(ordered) - num_cut]
    winsorized = [kept[0]] * num_cut + kept + [kept[-1]] * num_cut
    error = statistics.stdev(winsorized) / ((1.0 - 2.0 * _CUT) * math.sqrt(len(ordered)))
    quantile = _Z_95 + (_Z_95**3 + _Z_95) / (4.0 * (len(kept) - 1))  # of Student's t, to first order
    return math.exp(statistics.fmean(kept)), math.expm1(quantile * error)


def is_enough(num_steps: int, elapsed_s: float, seconds: Callable[[], Sequence[float]]) -> bool:
    """Return whether the measurement ends: after a turn, when the time is over, or after a section, when the interval
    is narrow.

    num_steps: completed steps. elapsed_s: the time since the warm-up. seconds: returns the seconds of all steps.
    """
    num_counted = num_steps - WARMUP
    if num_counted <= 0 or num_counted % TURN:
        return False
    if elapsed_s >= MAX_S:
        return True
    if num_counted % SECTION or num_counted < MIN_SECTIONS * SECTION:
        return False
    return ratio_and_half_width(turn_logs(seconds()))[1] <= MAX_HALF_WIDTH
