"""The parent-death guard of a probe: the probe ends when the process that started it ends, for any reason."""

from __future__ import annotations

import os

from megatrain.programs.processes import install_parent_death_guard

PARENT_VARIABLE = "MEGATRAIN_PROBE_PARENT"


def guard_probe() -> None:
    """Install a parent-death guard; the environment names the process that started this probe."""
    install_parent_death_guard(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
