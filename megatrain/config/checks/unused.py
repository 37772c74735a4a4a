"""Keys that were changed although another key's value makes them meaningless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatrain.config.options import options_of
from megatrain.config.problem import Problem
from megatrain.config.toml_text import value_text


def unused_problems(section: str, values: Any, name: str, ruling: str, needed: str) -> Iterator[Problem]:
    """Yield that `name` of the section was changed although it has a meaning only if the key `ruling` is `needed`.

    `values`: the section's dataclass.
    """
    value, default = getattr(values, name), options_of(values.__class__)[name].default
    if value != default:
        yield Problem(
            (f"{section}.{name}", f"{section}.{ruling}"),
            f'{section}.{name}={value_text(value)} does nothing with {section}.{ruling}="{getattr(values, ruling)}"; '
            f'use {ruling}="{needed}" or {name}={value_text(default)}',
        )
