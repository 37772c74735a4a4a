"""A mistake in a configuration, and the keys that it involves, so that one mistake is not reported twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.config.origin import DefaultOrigin, Origin


@dataclass(frozen=True, slots=True)
class Problem:
    """A message without its place, and the keys ("section.key") whose values it involves, the blamed one first."""

    keys: tuple[str, ...]
    text: str

    def located(self, origins: Mapping[str, Origin]) -> str:
        """Return the message with its place: that of the first of the keys that was set."""
        known = [origins[key] for key in self.keys if key in origins]
        written = [origin for origin in known if not isinstance(origin, DefaultOrigin)]
        location = next(iter(written or known), None)
        return self.text if location is None else f"{self.text} ({location})"
