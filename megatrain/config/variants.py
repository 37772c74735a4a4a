"""Variants of the model that other packages add: their entry points, found by name without importing them.

The value of a key of [model] may be the name of an entry point of the key's group. docs/guides/extending.md describes
the objects that entry points refer to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megatrain.contracts.errors import ConfigError

GROUPS: Mapping[str, str] = {
    "mlp": "megatrain.activations",
    "norm": "megatrain.norms",
    "attention": "megatrain.attentions",
    "positions": "megatrain.positions",
    "rope_scaling": "megatrain.rope_scalings",
}
"""The group of entry points of each key that may name a variant."""
FAMILY_GROUP = "megatrain.hf_families"


def is_variant(key: str, name: str) -> bool:
    """Return whether an installed package has a variant of this name for model.`key`.

    Raises: ConfigError when several packages have it.
    """
    return _found(GROUPS[key], name) is not None


@cache
def load_variant(key: str, name: str) -> Any:
    """Import the variant `name` of model.`key`, and return what its entry point refers to.

    Raises: ConfigError when no package has it, several have it, or it cannot be imported.
    """
    group = GROUPS[key]
    found = _found(group, name)
    if found is None:
        raise ConfigError(
            [f'model.{key}="{name}" is no entry point of the group {group}; install the package that has it']
        )
    return _loaded(found, f'model.{key}="{name}"')


def load_families() -> list[Any]:
    """Return the Hugging Face families that other packages add, in the order of their entry points' names.

    Raises: ConfigError, which names the package, when one cannot be imported.
    """
    found = sorted(entry_points(group=FAMILY_GROUP), key=lambda entry_point: entry_point.name)
    return [
        _loaded(entry_point, f'entry point "{entry_point.name}" of the group {FAMILY_GROUP}')() for entry_point in found
    ]


def _loaded(found: EntryPoint, what: str) -> Any:
    """Import what an entry point refers to. Raises: ConfigError, which names the package, when that fails."""
    try:
        return found.load()
    except Exception as error:
        where = f"{found.value} of the package {_package(found)}"
        raise ConfigError([f"{what}: {where} cannot be imported: {type(error).__name__}: {error}"]) from error


def _found(group: str, name: str) -> EntryPoint | None:
    found = {entry_point.value: entry_point for entry_point in entry_points(group=group, name=name)}
    if len(found) > 1:
        packages = ", ".join(sorted(_package(entry_point) for entry_point in found.values()))
        raise ConfigError(
            [f'entry point "{name}" of the group {group}: several packages have it, {packages}; keep one']
        )
    return next(iter(found.values()), None)


def _package(found: EntryPoint) -> str:
    return found.dist.name if found.dist is not None else found.value
