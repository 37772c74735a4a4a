"""Removes checkpoints, although a round may start at any time.

claims/5e1f09aa7c01b2d3.removing lists what is being removed:

    {"schema_version": 1, "holder": "process 17 on host-3", "steps": {"main": [10, 20]}}

A round may go back to any older step, so no process may remove a step that a starting round has chosen. Both processes
write their own file before they read the other's. The remover creates its record, then looks for a claim that is newer
than the newest one at the time of its choice. A starting round creates its claim, then reads the records, and resumes
from no step that a record lists. So the remover finds the claim and removes nothing, or the round finds the record, or
both. The only assumption is that a read finds every file whose write has completed. Object stores guarantee that too.

The remover deletes its record when the last file is gone. If the remover exits earlier or freezes in the middle of a
removal, its record stays, because no other process can distinguish the two cases. Nothing is written to a listed step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from secrets import token_hex

from megatrain.checkpoint_format.checkpoint_files import remove_checkpoint
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.claims import CLAIMS_NAME, Claims, signature
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError, MissingFileError, NewerRoundError
from megatrain.contracts.files.json_object import JsonObject

SCHEMA_VERSION = 1
_RECORD_NAME = re.compile(r"[0-9a-f]{16}\.removing")


def being_removed(checkpoints: Location) -> dict[tuple[str, int], Location]:
    """Return the removal record of each checkpoint that a record lists, by branch and step.

    Raises: CheckpointError when a record is damaged or cannot be read.
    """
    found: dict[tuple[str, int], Location] = {}
    for entry in (checkpoints / CLAIMS_NAME).entries():
        if _RECORD_NAME.fullmatch(entry.name):
            with suppress(MissingFileError):  # that removal has just ended
                found |= dict.fromkeys(_listed(entry), entry)
    return found


class Remover:
    """A process that removes checkpoints."""

    def __init__(self) -> None:
        self._name = f"{token_hex(8)}.removing"
        self._begun = set[tuple[str, int]]()
        """Checkpoints whose removal has begun and is not complete. Storage may still carry out a request that it has
        not answered."""

    def remove(self, checkpoints: Location, chosen: Sequence[tuple[str, int]], newest_claim: int) -> Iterator[Location]:
        """Remove checkpoints, given by branch and step, and yield the location of each when it is gone.

        `newest_claim`: `Claims.newest_number` from before the caller read the state that its choice is based on.
        Raises: NewerRoundError when a round has started since then, which may resume from one of these; nothing is
        removed. CheckpointError when a checkpoint is pinned or cannot be removed; those after it are not removed.
        """
        if not chosen:
            return
        record = checkpoints / CLAIMS_NAME / self._name
        listed = self._begun.union(chosen)
        steps = {branch: sorted(step for name, step in listed if name == branch) for branch, _ in listed}
        content = {"schema_version": SCHEMA_VERSION, "holder": signature(None), "steps": steps}
        record.write((json.dumps(content, sort_keys=True) + "\n").encode())
        newer = Claims(checkpoints).newest_number()
        if newer > newest_claim:
            if not self._begun:
                record.remove()
            raise NewerRoundError(
                f"{checkpoints}: round {newer} has started meanwhile and may resume from any of the checkpoints to"
                " remove, so none was removed"
            )
        self._begun = listed
        for branch, step in chosen:
            location = checkpoints / branch / step_directory_name(step)
            remove_checkpoint(location)
            self._begun.remove((branch, step))
            yield location
        if not self._begun:
            record.remove()


def _listed(record: Location) -> list[tuple[str, int]]:
    hint = "remove it when no process is removing checkpoints there"
    reader = JsonObject.parse(record.read(), str(record), SCHEMA_VERSION, hint)
    listed: list[tuple[str, int]] = []
    for branch, steps in reader.mapping("steps").items():
        if not isinstance(steps, list) or not all(type(step) is int for step in steps):
            raise reader.error("steps", f"each branch must have a list of steps; {hint}")
        listed += [(branch, step) for step in steps]
    return listed


def check_not_being_removed(checkpoints: Location, branch: str, step: int) -> None:
    """Refuse a checkpoint that a removal record lists. Raises: CheckpointError."""
    record = being_removed(checkpoints).get((branch, step))
    if record is not None:
        raise CheckpointError(removal_text(checkpoints / branch / step_directory_name(step), record))


def removal_text(location: Location, record: Location) -> str:
    """Return a sentence about a checkpoint that `record` lists, with what to do if the remover no longer runs."""
    return (
        f"{location}: a process is removing this checkpoint, or ended during the removal. If {record} names a process"
        " that has ended, remove that file"
    )
