"""Finds NVIDIA DALI without importing it.

DALI has one package for each version of CUDA. The package `nvidia-dali` without a suffix is a placeholder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

DALI_INSTALL = "pip install 'megatrain[dali]'"
_PREFIX = "nvidia-dali-cuda"
_PLACEHOLDER = "nvidia-dali"


@dataclass(frozen=True, slots=True)
class FoundDali:
    """The installed build. problem: why it cannot be used; empty if its files show no reason."""

    package: str = ""
    version: str = ""
    problem: str = ""
    hint: str = ""


def find_dali() -> FoundDali:
    """Look for a build of DALI: its package and its module."""
    packages = {
        distribution.name.lower().replace("_", "-"): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    builds = sorted(name for name in packages if name.startswith(_PREFIX))
    if not builds:
        problem = "NVIDIA DALI is not installed"
        if _PLACEHOLDER in packages:
            problem = f"{problem}: the package {_PLACEHOLDER} is a placeholder without code"
            return FoundDali(problem=problem, hint=f"pip uninstall {_PLACEHOLDER}, then {DALI_INSTALL}")
        return FoundDali(problem=problem, hint=DALI_INSTALL)
    name, version = builds[-1], packages[builds[-1]]
    if len(builds) > 1:
        problem = f"several builds of NVIDIA DALI are installed over each other: {', '.join(builds)}"
        return FoundDali(name, version, problem, f"uninstall all of them, then {DALI_INSTALL}")
    try:
        has_module = importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        has_module = False
    if not has_module:
        return FoundDali(name, version, f"{name} {version} has no module nvidia.dali", f"{DALI_INSTALL} again")
    return FoundDali(name, version)
