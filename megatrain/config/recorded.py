"""The configuration that a run keeps, <run>/config.toml, read unchanged."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from megatrain.config.toml_text import value_text
from megatrain.contracts.files.bounded_files import read_below

CONFIG_NAME = "config.toml"
_MAX_BYTES = 4 << 20
"""Limit: no configuration is as large."""


def recorded_tables(root: Path) -> dict[str, Any] | None:
    """Return section -> key -> value of a run's configuration, unchecked; None if none can be read."""
    return read_tables(root)[0]


def read_tables(root: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the same as `recorded_tables`, and why there is nothing; "" if the run keeps no configuration."""
    try:
        return tomllib.loads(read_below(root, CONFIG_NAME, _MAX_BYTES).decode()), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{CONFIG_NAME} {error.strerror}"
    except (ValueError, RecursionError) as error:
        return None, f"{CONFIG_NAME} is damaged: {error}"


def recorded_values(root: Path) -> dict[str, str] | None:
    """Return section.key -> value as text, like `config_values`; None if none can be read."""
    tables = recorded_tables(root)
    if tables is None:
        return None
    sections = {name: values for name, values in tables.items() if isinstance(values, dict)}
    return {
        f"{section}.{name}": value_text(value) for section, values in sections.items() for name, value in values.items()
    }
