"""Warns when a stop may take longer than two thirds of runtime.save_grace_s, with figures and a hint."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.contracts.black_box.values import Progress
from megatrain.fencing.fence import StopTimes, longer_stop_s, stop_times
from megatrain.formatting import seconds_text
from megatrain.training.observers.step_observer import CompletedStep, StepObserver


class StopNotice(StepObserver):
    """Warns each time measured times raise the limit of a stop (`longer_stop_s`)."""

    def __init__(self, save_grace_s: float, read_progress: Callable[[], Progress]) -> None:
        self._read_progress = read_progress
        self._save_grace_s = save_grace_s
        self._given_s = save_grace_s

    def after_step(self, done: CompletedStep) -> str:
        """Return the warning if this rank's measured times raise the limit; usually an empty text."""
        progress = self._read_progress()
        # a first step compiles, so its duration does not predict later steps
        times = None if progress.median_step_ns is None else stop_times(progress)
        longer_s = None if times is None else longer_stop_s(self._given_s, times.total_s)
        if times is None or longer_s is None:
            return ""
        self._given_s = longer_s
        return self._text(times)

    def _text(self, times: StopTimes) -> str:
        parts = {
            "a step": times.step_s,
            "an evaluation": times.evaluation_s,
            "a snapshot": times.snapshot_s,
            "its copy to storage": times.write_s,
        }
        figures = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
        return (
            f"WARNING: a stop may take {times.total_s:.0f} s ({figures}), and runtime.save_grace_s="
            f"{self._save_grace_s:g} leaves too little room for that: the job extends its limit to "
            f"{self._given_s:.0f} s. Set runtime.save_grace_s={self._given_s:.0f}, and make the program that ends the "
            "job wait as long (docs/guides/stopping.md)"
        )
