"""torch's profiler on chosen ranks and steps: one Chrome trace per rank under <run>/logs/profile."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.config.recording import ProfileConfig
from megatrain.contracts.closable import Closable
from megatrain.training.observers.step_observer import CompletedStep, StepObserver


class StepProfiler(StepObserver, Closable):
    """Profiles steps [first_step, first_step + num_steps) if this rank is one of the chosen ranks."""

    def __init__(self, config: ProfileConfig, rank: int, directory: Path) -> None:
        self._config = config
        self._is_chosen = config.num_steps > 0 and rank in config.ranks
        self._path = directory / "profile" / f"rank-{rank:05d}.json"
        self._profile: profile | None = None

    def before_step(self, index: int) -> None:
        """Start the profiler before the first of the chosen steps."""
        if self._is_chosen and index == self._config.first_step:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def after_step(self, done: CompletedStep) -> str:
        """Write the trace after the last of the chosen steps, and return a line with its path."""
        last = self._config.first_step + self._config.num_steps - 1
        if self._profile is None or done.index != last:
            return ""
        first, count = self._config.first_step, self._config.num_steps
        return f"profile.first_step={first}, profile.num_steps={count}: the trace is {self._finish()}"

    def close(self) -> Path | None:
        """Write the trace so far, if the run ends before the last chosen step. Return its path."""
        return self._finish() if self._profile is not None else None

    def _finish(self) -> Path:
        assert self._profile is not None
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return self._path
