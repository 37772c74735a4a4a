"""A mistake in a configuration: what rests on which keys, so that one mistake is not reported twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.config.origin import DefaultOrigin, Origin


@dataclass(frozen=True, slots=True)
class Problem:
    """A message without its place, and the keys ("section.key") whose values it rests on, the blamed one first."""

    keys: tuple[str, ...]
    text: str

    def located(self, origins: Mapping[str, Origin]) -> str:
        """Return the message with its place: where the first of the keys that somebody wrote was written."""
        known = [origins[key] for key in self.keys if key in origins]
        written = [origin for origin in known if not isinstance(origin, DefaultOrigin)]
        place = next(iter(written or known), None)
        return self.text if place is None else f"{self.text} ({place})"
