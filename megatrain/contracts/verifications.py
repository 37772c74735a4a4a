"""When each checkpoint of a run was read and compared last, and with what result: <checkpoints>/VERIFIED, a line each.

`megatrain ckpt verify` writes it, whole or not at all. Whoever shows checkpoints reads it, and so does whoever chooses
one to go on from. It vouches for nothing: a checkpoint that was written later than it was verified is another one, and
the line says nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.contracts.errors import CheckpointError, CoordinationError, MissingFileError
from megatrain.contracts.location import Location
from megatrain.contracts.record import decode, encode

VERIFIED_NAME = "VERIFIED"
_MAX_LINES = 4096
_MAX_PROBLEM = 500


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found in one checkpoint. `problem`: the first of them; empty: all was as it was written."""

    branch: str
    step: int
    at_unix_s: float
    problem: str = ""
    num_problems: int = 0

    def is_of(self, written_unix_s: float | None) -> bool:
        """Say whether it is about the checkpoint that was written then: one that was written later is another."""
        return self.at_unix_s >= (written_unix_s or 0.0)

    @classmethod
    def of(cls, branch: str, step: int, at_unix_s: float, problems: list[str]) -> Verification:
        """Return the record of what `verify_checkpoint` found."""
        return cls(branch, step, at_unix_s, problems[0][:_MAX_PROBLEM] if problems else "", len(problems))


def read_verifications(checkpoints: Location) -> dict[tuple[str, int], Verification]:
    """Return the newest verification of each (branch, step); lines that cannot be read are skipped.

    Raises: CheckpointError when the file is there and cannot be read.
    """
    place = checkpoints / VERIFIED_NAME
    try:
        lines = place.read().splitlines()
    except MissingFileError:
        return {}
    found: dict[tuple[str, int], Verification] = {}
    for line in lines[-_MAX_LINES:]:
        try:
            one = decode(Verification, line, str(place))
        except CoordinationError:
            continue
        found[one.branch, one.step] = one
    return found


def known_verifications(checkpoints: Location) -> dict[tuple[str, int], Verification]:
    """Return the same, and nothing where it cannot be read: checkpoints are listed and resumed from without it."""
    try:
        return read_verifications(checkpoints)
    except CheckpointError:
        return {}


def note_verifications(checkpoints: Location, found: Iterable[Verification]) -> None:
    """Keep what was found, in place of what was known of the same checkpoints; the oldest beyond 4,096 are forgotten.

    Raises: CheckpointError when it cannot be written.
    """
    known = read_verifications(checkpoints)
    known.update({(one.branch, one.step): one for one in found})
    newest = sorted(known.values(), key=lambda one: one.at_unix_s)[-_MAX_LINES:]
    (checkpoints / VERIFIED_NAME).write(b"".join(encode(one) + b"\n" for one in newest))
