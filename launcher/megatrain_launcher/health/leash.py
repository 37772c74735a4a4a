"""The probe's side of `child`: it ends when the process that started it ends, however that comes about."""

from __future__ import annotations

import os

from megatrain.programs.processes import end_with_parent

PARENT_VARIABLE = "MEGATRAIN_PROBE_PARENT"


def end_with_starter() -> None:
    """Tie this probe's life to that of the process that its environment names."""
    end_with_parent(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
