"""Says that a stop takes longer than runtime.save_grace_s, with figures and the way out, when that turns out."""

from __future__ import annotations

from megatrain.contracts.black_box_values import Progress
from megatrain.contracts.texts import seconds_text
from megatrain.failures.fence import StopTimes, longer_stop_s, stop_times


class StopNotice:
    """Speaks when the job has to give itself longer than before: by the same rule as the deadlines of a round."""

    def __init__(self, save_grace_s: float) -> None:
        self._save_grace_s = save_grace_s
        self._given_s = save_grace_s

    def after_step(self, progress: Progress) -> str:
        """Return what is to be said of a stop that takes as long as this rank has measured; mostly nothing."""
        # the first step compiles: it says nothing of those to come
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
            "its way to storage": times.write_s,
        }
        figures = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
        return (
            f"WARNING: a stop may take {times.total_s:.0f} s ({figures}), and runtime.save_grace_s="
            f"{self._save_grace_s:g} is short for that: the job gives itself up to {self._given_s:.0f} s. Set "
            f"runtime.save_grace_s={self._given_s:.0f}, and have whoever ends the job wait as long "
            "(docs/guides/stopping.md)"
        )
