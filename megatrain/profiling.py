"""torch's profiler on chosen ranks and steps: a Chrome trace a rank under <run>/logs/profile."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.config.profile import ProfileConfig


class StepProfiler:
    """Profiles steps [first_step, first_step + num_steps) when this rank is one of the chosen."""

    def __init__(self, config: ProfileConfig, rank: int, directory: Path) -> None:
        self._config = config
        self._is_chosen = config.num_steps > 0 and rank in config.ranks
        self._path = directory / "profile" / f"rank-{rank:05d}.json"
        self._profile: profile | None = None

    def before_step(self, step: int) -> None:
        """Start when `step` is the first of the chosen ones."""
        if self._is_chosen and step == self._config.first_step:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def after_step(self, step: int) -> Path | None:
        """Write the trace when `step` was the last of the chosen ones, and return its path."""
        is_last = step == self._config.first_step + self._config.num_steps - 1
        return self._finish() if self._profile is not None and is_last else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> Path | None:
        """Write what was profiled when the run ends before the last chosen step."""
        return self._finish() if self._profile is not None else None

    def _finish(self) -> Path:
        assert self._profile is not None
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return self._path
