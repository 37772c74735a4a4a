"""pyarrow, which is optional: its parts are loaded where a file needs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from megatrain.contracts.errors import DataError


def part_of_pyarrow(name: str, path: object, action: str) -> ModuleType:
    """Return a module of pyarrow. Raises: DataError saying that the action on `path` needs the package."""
    try:
        importlib.import_module("pyarrow")
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise DataError(f"{path}: {action} needs pyarrow; pip install 'megatrain[data]'") from error
