"""The last verification of each checkpoint of a run and its result: <checkpoints>/VERIFIED, one line per checkpoint.

`megatrain ckpt verify` writes it atomically. The code that lists checkpoints, or chooses one to resume from, reads it.
A line does not apply to a checkpoint that was written after the verification, in place of the verified one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError, CoordinationError, MissingFileError
from megatrain.contracts.records.record import decode, encode

VERIFIED_NAME = "VERIFIED"
_MAX_LINES = 4096
_MAX_PROBLEM = 500


@dataclass(frozen=True, slots=True)
class Verification:
    """The result for one checkpoint. `problem`: the first problem; empty if it was intact."""

    branch: str
    step: int
    at_unix_s: float
    problem: str = ""
    num_problems: int = 0

    def applies_to(self, written_unix_s: float | None) -> bool:
        """Return whether the result applies to the checkpoint written at that time, and not to an earlier one."""
        return self.at_unix_s >= (written_unix_s or 0.0)

    @classmethod
    def of(cls, branch: str, step: int, at_unix_s: float, problems: list[str]) -> Verification:
        """Return the record of a result of `verify_checkpoint`."""
        return cls(branch, step, at_unix_s, problems[0][:_MAX_PROBLEM] if problems else "", len(problems))


def read_verifications(checkpoints: Location) -> dict[tuple[str, int], Verification]:
    """Return the newest verification of each (branch, step); lines that cannot be read are skipped.

    Raises: CheckpointError when the file exists but cannot be read.
    """
    location = checkpoints / VERIFIED_NAME
    try:
        lines = location.read().splitlines()
    except MissingFileError:
        return {}
    found: dict[tuple[str, int], Verification] = {}
    for line in lines[-_MAX_LINES:]:
        try:
            verification = decode(Verification, line, str(location))
        except CoordinationError:
            continue
        found[verification.branch, verification.step] = verification
    return found


def known_verifications(checkpoints: Location) -> dict[tuple[str, int], Verification]:
    """Like `read_verifications`, but empty if the file cannot be read: listing and resuming work without it."""
    try:
        return read_verifications(checkpoints)
    except CheckpointError:
        return {}


def record_verifications(checkpoints: Location, found: Iterable[Verification]) -> None:
    """Store results. They replace earlier ones of the same checkpoints; only the newest 4,096 are kept.

    Raises: CheckpointError when the file cannot be read or written.
    """
    known = read_verifications(checkpoints)
    known.update({(verification.branch, verification.step): verification for verification in found})
    newest = sorted(known.values(), key=lambda verification: verification.at_unix_s)[-_MAX_LINES:]
    (checkpoints / VERIFIED_NAME).write(b"".join(encode(verification) + b"\n" for verification in newest))
