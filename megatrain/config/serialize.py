"""A configuration as text: TOML that loads to an equal configuration, and a hash that identifies its content.

A run stores its configuration as <run>/config.toml. This module reads the file without checks, because another version
of megatrain may have written it.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config.config import Config
from megatrain.config.options import Value
from megatrain.config.origin import ValueOrigin
from megatrain.config.toml_text import value_text
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.bounded_files import read_below

CONFIG_NAME = "config.toml"
_MAX_BYTES = 4 << 20
"""Upper bound of the size of a configuration file."""


def to_toml(config: Config, origins: Mapping[str, ValueOrigin] | None = None) -> str:
    """Return every key of every section as TOML, with a comment on its origin if `origins` is given."""
    blocks = []
    for section, values in config.to_dict().items():
        heading, *lines = section_toml(section, values).split("\n")
        if origins is not None:
            width = max(map(len, lines))
            locations = [origins[f"{section}.{name}"] for name in values]
            lines = [f"{line:<{width}}  # {location}" for line, location in zip(lines, locations, strict=True)]
        blocks.append("\n".join([heading, *lines]))
    return "\n\n".join(blocks) + "\n"


def section_toml(section: str, values: Mapping[str, Value]) -> str:
    """Return one section as TOML, without a line feed at its end."""
    return "\n".join([f"[{section}]", *(f"{name} = {value_text(value)}" for name, value in values.items())])


def config_values(config: Config) -> dict[str, str]:
    """Return section.key -> value as text, of every key."""
    return _texts(config.to_dict())


def config_of_values(values: Mapping[str, str], job: str) -> Config:
    """Return the configuration of a job from the texts that `config_values` made of it.

    Raises: ConfigError for a text that is not a TOML value, and as `Config.from_dict`.
    """
    tables: dict[str, dict[str, object]] = {}
    for key, text in values.items():
        section, _, name = key.partition(".")
        try:
            tables.setdefault(section, {})[name] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, KeyError, RecursionError) as error:
            raise ConfigError([f"{key} of job {job!r} is {text!r}, which is not a value: {error}"]) from error
    return Config.from_dict(tables)


def config_hash(config: Config) -> str:
    """Return the SHA-256 of the canonical JSON of all keys, names and directories of the run included."""
    canonical = json.dumps(config.to_dict(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_tables(root: Path) -> tuple[dict[str, Any] | None, str]:
    """Return section -> key -> value of a run's configuration, unchecked, and ""; or None, and why it cannot be read.

    The reason is empty if the run has no configuration file.
    """
    try:
        return tomllib.loads(read_below(root, CONFIG_NAME, _MAX_BYTES).decode()), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{CONFIG_NAME} {error.strerror}"
    except (ValueError, RecursionError) as error:
        return None, f"{CONFIG_NAME} is damaged: {error}"


def recorded_values(root: Path) -> dict[str, str] | None:
    """Return section.key -> value as text, like `config_values`; None if the file cannot be read."""
    tables, _ = read_tables(root)
    if tables is None:
        return None
    return _texts({name: values for name, values in tables.items() if isinstance(values, dict)})


def _texts(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{section}.{name}": value_text(value) for section, values in tables.items() for name, value in values.items()
    }
