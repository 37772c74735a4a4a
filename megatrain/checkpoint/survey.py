"""All checkpoints of a run with their states, and the one to resume from. Reads no tensors and loads no torch.

Only small files are read, such as the manifests and the recorded results of `megatrain ckpt verify`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from megatrain.checkpoint_format.branches import Branch, list_branches
from megatrain.checkpoint_format.checkpoint_files import is_pinned, is_unfinished, pin_reason, read_manifest
from megatrain.checkpoint_format.checkpoint_names import step_of
from megatrain.checkpoint_format.commit import is_committed
from megatrain.checkpoint_format.lineage import candidates, current_branch
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.removals import being_removed
from megatrain.checkpoint_format.resume_point import ResumePoint, resume_point
from megatrain.checkpoint_format.verifications import Verification, known_verifications
from megatrain.contracts.errors import CheckpointError


class CheckpointState(StrEnum):
    """The state of a checkpoint directory. A job loads COMMITTED and PINNED ones; a DAMAGED one as a last resort."""

    COMMITTED = "committed"
    PINNED = "pinned"
    UNCOMMITTED = "uncommitted"
    """It has no valid COMMIT and no mark of a write in progress: it may have been complete once."""
    UNFINISHED = "unfinished"
    """It was begun but never completed: a process is writing it, or its writer died."""
    DAMAGED = "damaged"
    """COMMIT names a manifest that cannot be used, or a verification found damaged files."""
    BEING_REMOVED = "being removed"
    """A process is removing it, or exited before the removal was complete."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint directory. The fields that come from a manifest are None without one."""

    branch: str
    step: int
    location: Location
    state: CheckpointState
    is_in_ancestry: bool
    """Whether it is committed and in the ancestry of the run's current branch; else it is abandoned or incomplete."""
    num_bytes: int
    """Bytes of the files that the manifest lists; of all files if it is not committed or is being removed; 0 if its
    manifest cannot be used."""
    written_unix_s: float | None = None
    consumed_tokens: int | None = None
    round: int | None = None
    pin_reason: str | None = None
    problem: str | None = None
    verification: Verification | None = None
    """The result of its last verification; None without one."""

    @property
    def name(self) -> str:
        return f"{self.branch}/{self.location.name}"


@dataclass(frozen=True, slots=True)
class Survey:
    """The branches and checkpoints of a run: branches by name, the checkpoints of each branch by step."""

    current: str | None
    branches: tuple[Branch, ...]
    checkpoints: tuple[FoundCheckpoint, ...]
    resume: ResumePoint


def survey(checkpoints: Location) -> Survey:
    """Return all branches and checkpoints of a run.

    Raises: CheckpointError when a BRANCH file is damaged or something cannot be read.
    """
    branches = list_branches(checkpoints)
    current: str | None = None
    ancestry: set[tuple[str, int]] = set()
    with suppress(CheckpointError):  # the resume point describes the problem
        current = current_branch(checkpoints) if branches else None
        ancestry = {(candidate.branch, candidate.step) for candidate in candidates(checkpoints)}
    verified, begun = known_verifications(checkpoints), being_removed(checkpoints)
    found = [
        _found_checkpoint(
            branch.name,
            step,
            entry,
            is_in_ancestry=(branch.name, step) in ancestry,
            verification=verified.get((branch.name, step)),
            is_being_removed=(branch.name, step) in begun,
        )
        for branch in branches
        for entry in (checkpoints / branch.name).entries()
        if (step := step_of(entry.name)) is not None
    ]
    return Survey(current, tuple(branches), tuple(found), resume_point(checkpoints))


def stored_bytes(manifest: Manifest) -> int:
    """Return the bytes of all files that a manifest lists."""
    return sum(entry.size for entry in manifest.files.values())


def _found_checkpoint(
    branch: str,
    step: int,
    location: Location,
    *,
    is_in_ancestry: bool,
    verification: Verification | None,
    is_being_removed: bool,
) -> FoundCheckpoint:
    if is_being_removed:
        num_bytes = sum(entry.size() or 0 for entry in location.entries())
        return FoundCheckpoint(branch, step, location, CheckpointState.BEING_REMOVED, is_in_ancestry, num_bytes)
    try:
        if not is_committed(location):
            state = CheckpointState.UNFINISHED if is_unfinished(location) else CheckpointState.UNCOMMITTED
            num_bytes = sum(entry.size() or 0 for entry in location.entries())
            return FoundCheckpoint(branch, step, location, state, is_in_ancestry, num_bytes)
        manifest = read_manifest(location, branch=branch)
    except CheckpointError as error:
        return FoundCheckpoint(branch, step, location, CheckpointState.DAMAGED, is_in_ancestry, 0, problem=str(error))
    if verification is not None and not verification.applies_to(manifest.written_unix_s):
        verification = None
    state = CheckpointState.PINNED if is_pinned(location) else CheckpointState.COMMITTED
    reason, problem = None, None
    try:
        reason = pin_reason(location)
    except CheckpointError as error:
        problem = str(error)
    return FoundCheckpoint(
        branch=branch,
        step=step,
        location=location,
        state=CheckpointState.DAMAGED if verification is not None and verification.problem else state,
        is_in_ancestry=is_in_ancestry,
        num_bytes=stored_bytes(manifest),
        written_unix_s=manifest.written_unix_s,
        consumed_tokens=manifest.consumed_tokens,
        round=manifest.round,
        pin_reason=reason,
        problem=problem,
        verification=verification,
    )
