"""What a path or URL on a command line means: a run, its checkpoints, one branch of them, or one checkpoint.

A place knows what is below it, not above, so the places above come from the text. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.url_location import open_location
from megatrain.contracts.branches import BRANCH_NAME
from megatrain.contracts.checkpoint_files import COMMIT_NAME, commit_problem, is_manifest_name, step_of
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import RESUME_NAME, Candidate, candidates
from megatrain.contracts.location import Location

CHECKPOINTS_NAME = "checkpoints"


@dataclass(frozen=True, slots=True)
class NamedPlace:
    """What an argument names. `checkpoints` holds the branches of a run; None: a checkpoint that lies alone.

    `branch`: of the branch or checkpoint that was named. `checkpoint`: the one that was named.
    """

    checkpoints: Location | None
    branch: str | None = None
    checkpoint: Location | None = None


def name_place(text: str) -> NamedPlace:
    """Return what `text` names, whether or not anything in it is whole.

    Raises: CheckpointError when there is neither a checkpoint nor a place for some.
    """
    place = open_location(text)
    if _is_checkpoint(text, place):
        branch, checkpoints = _above(text, 1), _above(text, 2)
        if checkpoints is not None and branch is not None and (branch / BRANCH_NAME).exists():
            return NamedPlace(checkpoints, branch.name, place)
        return NamedPlace(None, None, place)
    above = _above(text, 1)
    if above is not None and (place / BRANCH_NAME).size() is not None:
        return NamedPlace(above, _name(text))
    for directory in (place, place / CHECKPOINTS_NAME):
        if _is_lineage(directory):
            return NamedPlace(directory)
    raise no_checkpoint(text)


def find_checkpoint(text: str, step: int | None = None, branch: str | None = None) -> Location:
    """Return the committed checkpoint that `text` means: itself, or the one from which a run or a branch would go on.

    `step` asks for that one of the run or branch, `branch` for another branch than the current one.
    Raises: CheckpointError when there is none.
    """
    named = name_place(text)
    if named.checkpoint is not None and step is None and branch is None:
        problem = commit_problem(named.checkpoint)
        if problem is not None:
            raise CheckpointError(
                f"{named.checkpoint} is no complete checkpoint, and nothing is read from it: {problem}"
            )
        return named.checkpoint
    return find_step(named, text, step, branch).location


def find_step(named: NamedPlace, text: str, step: int | None, branch: str | None) -> Candidate:
    """Return the checkpoint of a step, or the newest, of what a run or a branch may go on from.

    Raises: CheckpointError naming the steps that there are.
    """
    if named.checkpoints is None:
        raise CheckpointError(f"{text} is one checkpoint outside of a run; name it without a step and a branch")
    found = candidates(named.checkpoints, branch or named.branch)
    if not found:
        raise no_checkpoint(text)
    if step is None:
        return found[0]
    matching = [one for one in found if one.step == step]
    if matching:
        return matching[0]
    steps = ", ".join(f"{one.branch}/{one.step}" for one in found[:10]) + (" and older" if len(found) > 10 else "")
    raise CheckpointError(
        f"{named.checkpoints}: no committed checkpoint of step {step} in {branch or named.branch or 'its current line'}"
        f" (there are: {steps}); name one of these, or another --branch"
    )


def no_checkpoint(text: str) -> CheckpointError:
    """Return the error that there is nothing to find."""
    return CheckpointError(
        f"{text} is no checkpoint and holds none; name a run directory or runs/<job>/checkpoints/<branch>/step-*"
    )


def _is_checkpoint(text: str, place: Location) -> bool:
    if step_of(_name(text)) is not None and place.exists():
        return True
    entries = place.entries() if place.size() is None else []
    return any(entry.name == COMMIT_NAME or is_manifest_name(entry.name) for entry in entries)


def _name(text: str) -> str:
    return text.rstrip("/").rpartition("/")[2] if "://" in text else Path(text).resolve().name


def _above(text: str, num_levels: int) -> Location | None:
    """Return the place so many levels above, None where there is none."""
    if "://" not in text:
        path = Path(text).resolve()
        return open_location(str(path.parents[num_levels - 1])) if len(path.parents) >= num_levels else None
    scheme, _, path_text = text.partition("://")
    parts = path_text.rstrip("/").split("/")
    return open_location(f"{scheme}://{'/'.join(parts[:-num_levels])}") if len(parts) > num_levels else None


def _is_lineage(directory: Location) -> bool:
    """Say whether a directory is one of checkpoints: then what is wrong in it is worth telling."""
    if (directory / RESUME_NAME).exists():
        return True
    return any(step_of(entry.name) is not None or (entry / BRANCH_NAME).exists() for entry in directory.entries())
