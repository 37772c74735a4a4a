"""Whether workers will find the module that they must run; runs none of it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path


def why_not_run(module: str, directory: Path) -> str:
    """Return why `python -m module`, started in `directory`, would not find its program; empty if it would."""
    top, *rest = module.split(".")
    spec = _find_top(top, directory) if top.isidentifier() else None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    if spec is None or name != module:
        return f"there is no module {module} in {directory} or where Python looks; run `python -m {module}` to see why"
    places = spec.submodule_search_locations
    if places is not None and PathFinder.find_spec(f"{module}.__main__", places) is None:
        return f"is a package without a __main__.py; name the module in it that trains: -m {module}.NAME"
    return ""


def _find_top(name: str, directory: Path) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, [str(directory), *sys.path])
    if found is not None:
        return found
    try:
        return find_spec(name)  # finders of other kinds also count: editable installs have one
    except (ImportError, ValueError):
        return None
