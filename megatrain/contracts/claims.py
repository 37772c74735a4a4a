"""A chain of claims: who may write to a shared directory, one after another.

    claims/00000001, claims/00000002, ...     made exclusively, never changed, never removed

The newest claim is the holder's. Whoever makes claim n + 1 has read claim n, and exactly one process makes it, so all
agree on one order; a process that finds a claim after its own was overtaken and is fenced for good. Nothing is held
open: a process that is frozen, or a host that is gone, keeps nobody out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.contracts.location import Location, put_once

CLAIMS_NAME = "claims"
_NAME = re.compile(r"[0-9]{8,}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A link of the chain. `content` is what its maker wrote, the same for no two."""

    number: int
    content: bytes


class Claims:
    """The claims to a directory."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory / CLAIMS_NAME

    def newest(self) -> Claim | None:
        """Return the holder's claim, None where nobody has made one. Raises: CheckpointError."""
        number = max((int(entry.name) for entry in self._directory.entries() if _NAME.fullmatch(entry.name)), default=0)
        return Claim(number, self.place(number).read()) if number else None

    def add(self, content_after: Callable[[Claim | None], bytes]) -> Claim:
        """Make the next claim, with what `content_after` says in the face of the newest; it raises to make none.

        Raises: CheckpointError when it cannot be written. It may yet appear then, for a holder that never comes.
        """
        while True:
            newest = self.newest()
            content = content_after(newest)
            number = 1 if newest is None else newest.number + 1
            if put_once(self.place(number), content):
                return Claim(number, content)

    def is_overtaken(self, number: int) -> bool:
        """Say whether there is a claim after this one. Raises: CheckpointError when that cannot be told."""
        return self.place(number + 1).exists()

    def place(self, number: int) -> Location:
        """Return where a claim lies."""
        return self._directory / f"{number:08d}"
