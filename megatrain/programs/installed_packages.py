"""Whether optional packages are installed, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def are_installed(packages: Sequence[str]) -> bool:
    """Return whether Python finds all of these top-level packages."""
    return all(importlib.util.find_spec(name) is not None for name in packages)
