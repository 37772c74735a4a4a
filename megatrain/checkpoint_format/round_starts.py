"""Where each round of a run resumed: claims/00000012.resume has the branch and step of round 12.

Only the process that claimed a round's number writes the round's file (claims.py). A checkpoint of an older round is
superseded, and does not count, if a newer round has resumed from an earlier step: the checkpoint was committed after
the newer round had started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.checkpoint_format.branches import branch_name_of
from megatrain.checkpoint_format.claims import CLAIMS_NAME
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.files.json_object import JsonObject

SCHEMA_VERSION = 1
_START_NAME = re.compile(r"([0-9]{8,})\.resume")


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Where a round resumed. step: None when unknown."""

    round: int
    branch: str
    step: int | None


def begin_round(checkpoints: Location, start: RoundStart) -> None:
    """Record where a round resumes. Only the process that claimed its number may call it. Raises: CheckpointError."""
    content = {"schema_version": SCHEMA_VERSION, "branch": start.branch, "step": start.step}
    start_location(checkpoints, start.round).write((json.dumps(content, sort_keys=True) + "\n").encode())


def round_starts(checkpoints: Location, branch: str, after: int) -> list[RoundStart]:
    """Return the recorded starts in a branch of rounds newer than `after`.

    Raises: CheckpointError when a record is damaged or cannot be read.
    """
    starts = (_read_start(checkpoints, number) for number in started_rounds(checkpoints) if number > after)
    return [start for start in starts if start.branch == branch]


def newest_start(checkpoints: Location) -> RoundStart | None:
    """Return the newest recorded start, None without one. Raises: CheckpointError as `round_starts` does."""
    numbers = started_rounds(checkpoints)
    return _read_start(checkpoints, numbers[-1]) if numbers else None


def is_superseded(step: int, round_number: int, starts: Sequence[RoundStart]) -> bool:
    """Return whether a round's checkpoint does not count because a newer round in `starts` resumed from before it."""
    return any(start.round > round_number and start.step is not None and start.step < step for start in starts)


def start_location(checkpoints: Location, number: int) -> Location:
    """Return the location of a round's resume record."""
    return checkpoints / CLAIMS_NAME / f"{number:08d}.resume"


def started_rounds(checkpoints: Location) -> list[int]:
    """Return the numbers of all rounds with a resume record, ascending."""
    names = (entry.name for entry in (checkpoints / CLAIMS_NAME).entries())
    return sorted(int(match[1]) for name in names if (match := _START_NAME.fullmatch(name)))


def _read_start(checkpoints: Location, number: int) -> RoundStart:
    location = start_location(checkpoints, number)
    hint = 'it must name the branch to continue, such as {"schema_version": 1, "branch": "main", "step": null}'
    reader = JsonObject.parse(location.read(), str(location), SCHEMA_VERSION, hint)
    step = None if reader.is_null("step") else reader.count("step")
    return RoundStart(number, branch_name_of(reader, "branch"), step)
