"""Resolve a path or URL of a command line: a run, its checkpoints, one branch of them, or one checkpoint.

A Location has no method for its parent, so the directories above it are derived from the text. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint_format.branches import BRANCH_NAME
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME, is_manifest_name, step_of
from megatrain.checkpoint_format.commit import commit_problem
from megatrain.checkpoint_format.lineage import Candidate, candidates
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.resume_point import with_problems
from megatrain.checkpoint_format.round_starts import started_rounds
from megatrain.checkpoint_format.url_location import open_location
from megatrain.contracts.errors import CheckpointError

CHECKPOINTS_NAME = "checkpoints"


@dataclass(frozen=True, slots=True)
class ResolvedLocation:
    """The result of resolving a path. `checkpoints` holds the branches of a run; None: a checkpoint outside of a run.

    `branch`: the named branch, or that of the named checkpoint. `checkpoint`: the named checkpoint, if any.
    """

    checkpoints: Location | None
    branch: str | None = None
    checkpoint: Location | None = None


def resolve_location(text: str) -> ResolvedLocation:
    """Return what `text` names, whether or not its checkpoints are complete.

    Raises: CheckpointError when it is neither a checkpoint nor a directory that holds checkpoints.
    """
    location = open_location(text)
    if _is_checkpoint(text, location):
        branch, checkpoints = _above(text, 1), _above(text, 2)
        if checkpoints is not None and branch is not None and (branch / BRANCH_NAME).exists():
            return ResolvedLocation(checkpoints, branch.name, location)
        return ResolvedLocation(None, None, location)
    above = _above(text, 1)
    if above is not None and (location / BRANCH_NAME).size() is not None:
        return ResolvedLocation(above, _name(text))
    for directory in (location, location / CHECKPOINTS_NAME):
        if _is_lineage(directory):
            return ResolvedLocation(directory)
    raise no_checkpoint(text)


def choose_checkpoint(
    text: str, step: int | None = None, branch: str | None = None
) -> tuple[Location, tuple[str, ...]]:
    """Return the committed checkpoint to read, and a note for each newer one that was skipped.

    If `text` names a run or a branch, and `step` is None, it is the newest one without known damage, as when a job
    resumes.
    Raises: CheckpointError, as `find_checkpoint`.
    """
    resolved = resolve_location(text)
    notes: list[str] = []
    if resolved.checkpoints is not None and resolved.checkpoint is None and step is None:
        found = candidates(resolved.checkpoints, branch or resolved.branch)
        for candidate, problem in with_problems(resolved.checkpoints, found):
            if problem is None:
                return candidate.location, tuple(notes)
            notes.append(f"{candidate.branch}/{candidate.location.name} is damaged and was skipped: {problem}")
    return find_checkpoint(text, step, branch), ()


def find_checkpoint(text: str, step: int | None = None, branch: str | None = None) -> Location:
    """Return the committed checkpoint that `text` names; for a run or a branch, its newest one, damaged or not.

    `step` selects a step of the run or branch, `branch` another branch than the current one.
    Raises: CheckpointError when there is none.
    """
    resolved = resolve_location(text)
    if resolved.checkpoint is not None and step is None and branch is None:
        problem = commit_problem(resolved.checkpoint)
        if problem is not None:
            raise CheckpointError(f"{resolved.checkpoint} is not a complete checkpoint, so it is not read: {problem}")
        return resolved.checkpoint
    return find_step(resolved, text, step, branch).location


def find_step(resolved: ResolvedLocation, text: str, step: int | None, branch: str | None) -> Candidate:
    """Return the checkpoint of a step, or the newest one, among those that a run or a branch may resume from.

    Raises: CheckpointError naming the steps that exist.
    """
    if resolved.checkpoints is None:
        raise CheckpointError(f"{text} is a single checkpoint outside a run; name it without a step or branch")
    found = candidates(resolved.checkpoints, branch or resolved.branch)
    if not found:
        raise no_checkpoint(text)
    if step is None:
        return found[0]
    matching = [candidate for candidate in found if candidate.step == step]
    if matching:
        return matching[0]
    steps = ", ".join(f"{candidate.branch}/{candidate.step}" for candidate in found[:10]) + (
        " and older" if len(found) > 10 else ""
    )
    raise CheckpointError(
        f"{resolved.checkpoints}: no committed checkpoint of step {step} in "
        f"{branch or resolved.branch or 'its current ancestry'} (there are: {steps}); name one of these, "
        "or another --branch"
    )


def no_checkpoint(text: str) -> CheckpointError:
    """Return the error for a location without checkpoints."""
    return CheckpointError(
        f"{text} is not a checkpoint and contains none; name a run directory or runs/<job>/checkpoints/<branch>/step-*"
    )


def _is_checkpoint(text: str, location: Location) -> bool:
    if step_of(_name(text)) is not None and location.exists():
        return True
    entries = location.entries() if location.size() is None else []
    return any(entry.name == COMMIT_NAME or is_manifest_name(entry.name) for entry in entries)


def _name(text: str) -> str:
    return text.rstrip("/").rpartition("/")[2] if "://" in text else Path(text).resolve().name


def _above(text: str, num_levels: int) -> Location | None:
    """Return the location `num_levels` above, None where there is none."""
    if "://" not in text:
        path = Path(text).resolve()
        return open_location(str(path.parents[num_levels - 1])) if len(path.parents) >= num_levels else None
    scheme, _, path_text = text.partition("://")
    parts = path_text.rstrip("/").split("/")
    return open_location(f"{scheme}://{'/'.join(parts[:-num_levels])}") if len(parts) > num_levels else None


def _is_lineage(directory: Location) -> bool:
    """Return whether a directory holds a run's branches, even damaged ones: later errors then describe the damage."""
    return bool(started_rounds(directory)) or any(
        step_of(entry.name) is not None or (entry / BRANCH_NAME).exists() for entry in directory.entries()
    )
