"""A mistake in a configuration: the message, the keys that it involves, and the values that the message proposes.

The keys are recorded so that one mistake is not reported twice. Several checks report keys that were changed and have
no effect because of another key's value, so the messages about such keys are here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config.options import options_of
from megatrain.config.origin import DEFAULT, ValueOrigin
from megatrain.config.toml_text import value_text

_MAX_PROPOSED = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """A message without an origin, and the keys ("section.key") whose values it involves, the key at fault first."""

    keys: tuple[str, ...]
    text: str

    def located(self, origins: Mapping[str, ValueOrigin]) -> str:
        """Return the message with the origin of the first key that was set, or of the first one with any origin."""
        known = [origins[key] for key in self.keys if key in origins]
        written = [origin for origin in known if origin != DEFAULT]
        location = next(iter(written or known), None)
        return self.text if location is None else f"{self.text} ({location})"


def nearest(candidates: Iterable[int], found: int) -> tuple[int, ...]:
    """Return the few candidates closest to `found`, in ascending order."""
    closest = sorted(candidates, key=lambda candidate: (abs(candidate - found), candidate))
    return tuple(sorted(closest[:_MAX_PROPOSED]))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def multiples_around(divisor: int, found: int) -> tuple[int, ...]:
    """Return the positive multiples of `divisor` next to `found`: one below, if there is one, and one above."""
    below = found // divisor * divisor
    return tuple(multiple for multiple in (below, below + divisor) if multiple > 0)


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unset_problems(section: str, values: Any, needed: str) -> Iterator[Problem]:
    """Yield a problem for each key that was changed although its section has no effect while `needed` is not set.

    `values`: the section's dataclass.
    """
    for name, option in options_of(values.__class__).items():
        value = getattr(values, name)
        if value != option.default:
            yield Problem(
                (f"{section}.{name}", f"{section}.{needed}"),
                f"{section}.{name}={value_text(value)} does nothing without {section}.{needed}; set {needed}, or "
                f"remove {name}",
            )


def unused_problems(section: str, values: Any, name: str, ruling: str, needed: str) -> Iterator[Problem]:
    """Yield a problem if the key `name` was changed although it has an effect only if the key `ruling` is `needed`.

    `values`: the section's dataclass.
    """
    value, default = getattr(values, name), options_of(values.__class__)[name].default
    if value != default:
        yield Problem(
            (f"{section}.{name}", f"{section}.{ruling}"),
            f'{section}.{name}={value_text(value)} does nothing with {section}.{ruling}="{getattr(values, ruling)}"; '
            f'use {ruling}="{needed}" or {name}={value_text(default)}',
        )
