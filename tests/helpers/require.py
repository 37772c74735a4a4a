"""Skip tests that need a part this machine lacks, unless the machine must test everything.

MEGATRAIN_REQUIRE=all (set by .ci/run), or a comma-separated list of parts, turns the skip into a failure. A GPU and a
compiler are never required, nor are packages that run only with both: no rule of this project is tested with them
alone. Nor is NVIDIA DALI, which is large: `make test-dali` installs it, and requires it by name. Registries of packages
are not required either: they are unreachable from time to time, and the next machine that reaches them repeats the
test.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

NEVER_REQUIRED = frozenset({"apex", "compiler", "gpu", "npm-packages", "package-index", "transformer_engine"})
REQUIRED_BY_NAME = frozenset({"dali"})
"""Parts that "all" does not include."""


def require(part: str, found: bool, reason: str) -> None:
    """Continue if `part` was found, else skip the test (or the module) with the reason, or fail it."""
    if found:
        return
    if is_required(part, os.environ.get("MEGATRAIN_REQUIRE", "")):
        pytest.fail(f"{part} is required here (MEGATRAIN_REQUIRE) and missing: {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}", allow_module_level=True)


def require_module(name: str) -> ModuleType:
    """Return the imported module, which belongs to a package of the `dev` extra, or skip or fail as `require` does."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        require(name.partition(".")[0], found=False, reason=str(error))
        raise


def lazy_module(name: str) -> Any:
    """Return a module that is imported when a test first reads an attribute of it; skip or fail as `require_module`.

    For packages that take seconds to load: each process of a run collects all tests, and runs a part of them.
    """
    package = name.partition(".")[0]
    require(package, find_spec(package) is not None, f"no package {package}")
    return _LazyModule(name)


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest searches all objects of a test module for marks.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def is_required(part: str, requirement: str) -> bool:
    """Return whether `requirement`, the value of MEGATRAIN_REQUIRE, includes `part`."""
    if part in NEVER_REQUIRED:
        return False
    return (requirement == "all" and part not in REQUIRED_BY_NAME) or part in requirement.split(",")
