"""The whole loop, from a slow host to the resumed job: how soon the verdict comes, and whether any verdict is false.

Trainer, launcher, streamer and daemon are the real ones. Compute is paced, because there are more ranks than cores, and
real compute would measure only the scheduler. All hosts are this machine.
Run alone on the machine: python -m benchmarks closed_loop [--write]
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_most, must_hold
from benchmarks.result import Result
from megatrain.contracts.records.host_verdict import VerdictConfidence
from tests.helpers.closed_loop import SPARE, ClosedLoop, closed_loop
from tests.helpers.paced_train import Slowness, StepPace

CALM_RUNS, SLOW_RUNS = 20, 5
CALM_STEPS, STEPS_BEFORE, STEPS_AFTER = 60, 30, 30
NOISES = (0.01, 0.03, 0.06, 0.1)
"""Standard deviations of the pace; runs use them in turn."""
FACTOR = 1.3
STEPS_BAR, PACE_BAR = 20, 1.05


@dataclass(frozen=True, slots=True)
class Calm:
    """The result of a run without a slow host."""

    high: int
    low: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Slowed:
    """The result of a run with a slow rank. `next_step_s`: seconds from the driver's decision to the next step."""

    is_host_right: bool
    is_evicted: bool
    verdict_steps: int
    next_step_s: float
    steps_lost: int
    pace_after: float
    """The time of a step, divided by that before any rank was slow."""


def run() -> Result:
    """Run the loop without a slow host and with one. Each run has its own seed."""
    calm = [_calm(seed) for seed in range(CALM_RUNS)]
    slowed = [_slowed(seed) for seed in range(SLOW_RUNS)]
    return Result(
        name="closed-loop",
        title="From a slow host to the resumed job: 2 hosts of 2 gloo ranks and a spare, paced",
        command="python -m benchmarks closed_loop --write",
        rows=[_calm_row(calm), _slowed_row(slowed)],
        settings={
            "forward": "60 ms", "backward": "120 ms a micro-batch", "noise of the pace": f"{NOISES}, in turn",
            "slow": f"one rank's compute takes {FACTOR} times as long",
        },
        notes=[
            f"no slow host: {CALM_STEPS} steps a run; the driver may act only upon verdicts of high confidence",
            "verdict: steps from the first slow step to the verdict of high confidence",
            "next step: seconds from the driver's decision until the job had completed a step on other hosts",
            f"pace after: median time of {STEPS_AFTER} steps after the resume / that before",
        ],
        bars=_bars(calm, slowed),
    )  # fmt: skip


def _bars(calm: Sequence[Calm], slowed: Sequence[Slowed]) -> list[Bar]:
    """Return the bars, for the worst run of each case."""
    return [
        at_most("no slow host: evictions in all runs", sum(one.evictions for one in calm), 0),
        must_hold("one rank slow: its host is named and evicted in every run",
                  all(one.is_host_right and one.is_evicted for one in slowed)),
        at_most("one rank slow: lost steps, worst run", max(one.steps_lost for one in slowed), 0),
        at_most("one rank slow: steps until the verdict, worst run", max(one.verdict_steps for one in slowed),
                STEPS_BAR),
        at_most("one rank slow: pace after / before, worst run", max(one.pace_after for one in slowed), PACE_BAR),
    ]  # fmt: skip


def _calm(seed: int) -> Calm:
    with _loop(seed) as loop:
        loop.wait_for_more_steps(CALM_STEPS)
        high, low = (len(loop.verdicts(one)) for one in (VerdictConfidence.HIGH, VerdictConfidence.LOW))
        return Calm(high, low, len(loop.evictions()))


def _slowed(seed: int) -> Slowed:
    """Run the loop with a slow rank. Four consecutive seeds give four different ranks."""
    with _loop(seed) as loop:
        began = loop.newest_step()
        before = loop.wait_for_more_steps(STEPS_BEFORE)
        normal_s = loop.step_time_s(began + 2, before)
        parts = loop.view.rounds()[-1].hosts
        slow = parts[seed % len(parts)]
        loop.pace.slow_down(Slowness("compute", slow.host, seed // 2 % 2, factor=FACTOR))
        slowed_at = loop.newest_step()
        verdict = loop.wait_for_verdict()
        incident = loop.view.wait_recovered(0)
        newest = {part.host for part in loop.view.rounds()[-1].hosts}
        resumed = loop.newest_step()
        after = loop.wait_for_more_steps(STEPS_AFTER)
        assert incident.steps_lost is not None, "known of an incident that is over"
        return Slowed(
            is_host_right=verdict.hosts[0] == slow.host,
            is_evicted=newest == {part.host for part in parts} - {slow.host} | {SPARE},
            verdict_steps=(verdict.last_step or 0) - slowed_at,
            next_step_s=(incident.moments.first_step or 0.0) - (incident.moments.decided or 0.0),
            steps_lost=incident.steps_lost,
            pace_after=loop.step_time_s(resumed + 3, after) / normal_s,
        )


@contextmanager
def _loop(seed: int) -> Iterator[ClosedLoop]:
    root = Path(tempfile.mkdtemp(prefix="megatrain-closed-loop-"))
    try:
        with closed_loop(root, pace=StepPace(noise=NOISES[seed % len(NOISES)], seed=seed)) as loop:
            yield loop
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _calm_row(runs: Sequence[Calm]) -> dict[str, Any]:
    return {
        "case": "no slow host",
        "runs": len(runs),
        "host right": "",
        "evicted": sum(one.evictions for one in runs),
        "verdict, steps": f"{sum(one.high for one in runs)} high, {sum(one.low for one in runs)} low",
        "next step s": "",
        "steps lost": "",
        "pace after": "",
    }


def _slowed_row(runs: Sequence[Slowed]) -> dict[str, Any]:
    return {
        "case": "one rank slow",
        "runs": len(runs),
        "host right": sum(one.is_host_right for one in runs),
        "evicted": sum(one.is_evicted for one in runs),
        "verdict, steps": _spread([float(one.verdict_steps) for one in runs], 0),
        "next step s": _spread([one.next_step_s for one in runs], 2),
        "steps lost": max(one.steps_lost for one in runs),
        "pace after": _spread([one.pace_after for one in runs], 3),
    }


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
