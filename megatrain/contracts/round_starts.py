"""Where each round of a run went on: claims/00000012.resume names the branch and step of round 12.

Only whoever claimed a round's number writes its file (claims.py). What an older round commits after a newer one went on
from before it, is late: it was not there when the newer one looked, and counts for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.branches import branch_name_of
from megatrain.contracts.claims import CLAIMS_NAME
from megatrain.contracts.json_object import JsonObject
from megatrain.contracts.location import Location

SCHEMA_VERSION = 1
_START_NAME = re.compile(r"([0-9]{8,})\.resume")


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Where a round went on. step: None where that is not known."""

    round: int
    branch: str
    step: int | None


def begin_round(checkpoints: Location, start: RoundStart) -> None:
    """Say where a round goes on; only whoever claimed its number does. Raises: CheckpointError."""
    content = {"schema_version": SCHEMA_VERSION, "branch": start.branch, "step": start.step}
    start_place(checkpoints, start.round).write((json.dumps(content, sort_keys=True) + "\n").encode())


def round_starts(checkpoints: Location, branch: str, after: int) -> list[RoundStart]:
    """Return where rounds newer than `after` went on in a branch, as far as they have said so.

    Raises: CheckpointError when that is damaged or cannot be read.
    """
    starts = (_read_start(checkpoints, number) for number in started_rounds(checkpoints) if number > after)
    return [start for start in starts if start.branch == branch]


def newest_start(checkpoints: Location) -> RoundStart | None:
    """Return where the newest round went on that has said so. Raises: CheckpointError as `round_starts` does."""
    numbers = started_rounds(checkpoints)
    return _read_start(checkpoints, numbers[-1]) if numbers else None


def is_late(step: int, round_number: int, starts: Sequence[RoundStart]) -> bool:
    """Say whether a checkpoint by a round is none that counts: a newer one of `starts` went on from before it."""
    return any(start.round > round_number and start.step is not None and start.step < step for start in starts)


def start_place(checkpoints: Location, number: int) -> Location:
    """Return where a round says where it went on."""
    return checkpoints / CLAIMS_NAME / f"{number:08d}.resume"


def started_rounds(checkpoints: Location) -> list[int]:
    """Return the numbers of all rounds that have said where they went on, ascending."""
    names = (entry.name for entry in (checkpoints / CLAIMS_NAME).entries())
    return sorted(int(match[1]) for name in names if (match := _START_NAME.fullmatch(name)))


def _read_start(checkpoints: Location, number: int) -> RoundStart:
    place = start_place(checkpoints, number)
    mend = 'it must name the branch to go on with, as {"schema_version": 1, "branch": "main", "step": null}'
    reader = JsonObject.parse(place.read(), str(place), SCHEMA_VERSION, mend)
    step = None if reader.is_null("step") else reader.count("step")
    return RoundStart(number, branch_name_of(reader, "branch"), step)
