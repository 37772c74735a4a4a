"""A chain of claims, which determines the one process that may write to a shared directory.

    claims/00000001, claims/00000002, ...     created exclusively, never changed, never removed

The process with the newest claim is the holder. A process reads the newest claim before it creates the next one, and
exactly one process succeeds, so all agree on one order. A process that finds a claim after its own has been overtaken,
and may never write again. No lock is held, so a frozen process or a lost host blocks no other round.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from secrets import token_hex

from megatrain.checkpoint_format.location import Location, put_once
from megatrain.contracts.errors import FencedError
from megatrain.contracts.files.json_object import JsonObject

CLAIMS_NAME = "claims"
CLAIM_SCHEMA_VERSION = 1
_NAME = re.compile(r"[0-9]{8,}")


@dataclass(frozen=True, slots=True)
class JobRound:
    """A round of a job under a launcher. Only numbers of the same `counter` can be compared."""

    counter: str
    number: int

    def __str__(self) -> str:
        return f"round {self.number} of {self.counter}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A link of the chain, for a round of a launcher or for a process without one (counter "", round 0).

    `holder` is for messages; `token` makes the content of each claim unique.
    """

    number: int
    counter: str
    round: int
    holder: str
    token: str

    def is_same_round_or_newer(self, other: JobRound) -> bool:
        """Return whether this claim is of the same round, or of a newer one of the same counter."""
        return self.counter == other.counter and self.round >= other.number

    def content(self) -> bytes:
        raw = {"schema_version": CLAIM_SCHEMA_VERSION, **asdict(self)}
        return (json.dumps(raw, sort_keys=True) + "\n").encode()


class Claims:
    """The claims to a directory."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory / CLAIMS_NAME

    def __str__(self) -> str:
        return str(self._directory)

    def newest_number(self) -> int:
        """Return the number of the holder's claim, -1 without one. Raises: CheckpointError."""
        names = [entry.name for entry in self._directory.entries()]
        return max((int(name) for name in names if _NAME.fullmatch(name)), default=-1)

    def newest(self) -> Claim | None:
        """Return the holder's claim, None without one. Raises: CheckpointError."""
        number = self.newest_number()
        if number < 0:
            return None
        location = self.location_of(number)
        reader = JsonObject.parse(
            location.read(), str(location), CLAIM_SCHEMA_VERSION, "remove it if no job is running"
        )
        reader.check_names(Claim, "schema_version")
        names = reader.text("counter"), reader.count("round"), reader.text("holder"), reader.text("token")
        return Claim(number, *names)

    def take(self, job_round: JobRound | None, least: int = 1, *, own: bytes = b"") -> Claim:
        """Create the next claim, with a number of at least `least`.

        `own`: the content of this process's earlier claim, if the number of that claim is too low.
        Raises: FencedError when the newest claim is of the same counter, and of this round or a newer one;
        CheckpointError when the claim cannot be written. The claim may still appear later; its holder never writes.
        """
        while True:
            newest = self.newest()
            is_others = newest is not None and newest.content() != own
            if newest is not None and is_others and job_round is not None and newest.is_same_round_or_newer(job_round):
                raise FencedError(
                    f"{self.location_of(newest.number)}: the holder is {newest.holder}, and round"
                    f" {job_round.number} is not newer: this process is left over and must stop. If etcd was emptied"
                    f" since then and rounds are counted from the start, remove {self} once no process of the run is"
                    " left"
                )
            number = max(least, 0 if newest is None else newest.number + 1)
            claim = self.unwritten(job_round, number)
            if put_once(self.location_of(number), claim.content()):
                return claim

    @staticmethod
    def unwritten(job_round: JobRound | None, number: int) -> Claim:
        """Return a claim to create later, with exactly this number."""
        counter, round_number = ("", 0) if job_round is None else (job_round.counter, job_round.number)
        return Claim(number, counter, round_number, signature(job_round), token_hex(8))

    def is_overtaken(self, number: int) -> bool:
        """Return whether the claim after this one exists. Raises: CheckpointError when that is unknown."""
        return self.location_of(number + 1).exists()

    def location_of(self, number: int) -> Location:
        """Return the location of a claim."""
        return self._directory / f"{number:08d}"


def signature(job_round: JobRound | None) -> str:
    """Return this process's signature for claims and locks: "process 17 on host-3", and its round."""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    return process if job_round is None else f"{process}, {job_round}"
