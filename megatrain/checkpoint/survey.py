"""All checkpoints of a run with their states, and which of them a job would go on from. Reads no tensors, no torch.

Only what is cheap is looked at: the manifests, and what came out when `megatrain ckpt verify` read the files.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from megatrain.contracts.branches import Branch, list_branches
from megatrain.contracts.checkpoint_files import (
    is_committed,
    is_pinned,
    is_unfinished,
    pin_reason,
    read_manifest,
    step_of,
)
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import candidates, current_branch
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import Manifest
from megatrain.contracts.resume_point import ResumePoint, resume_point
from megatrain.contracts.verifications import Verification, known_verifications


class CheckpointState(StrEnum):
    """How far a checkpoint came. COMMITTED and PINNED ones count, the others are never read."""

    COMMITTED = "committed"
    PINNED = "pinned"
    UNCOMMITTED = "uncommitted"
    """No COMMIT vouches for it, and it does not say that it is being written: it may have been complete once."""
    UNFINISHED = "unfinished"
    """It was begun and never complete: it is being written, or its writer died."""
    DAMAGED = "damaged"
    """COMMIT vouches for a manifest that cannot be used, or a verification found that files are not as written."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint directory. What only a manifest tells is None without one."""

    branch: str
    step: int
    place: Location
    state: CheckpointState
    is_in_line: bool
    """Whether it is committed and the run's current branch leads to it; else it is abandoned or was never whole."""
    num_bytes: int
    """Of the files that the manifest lists, without one of all there are."""
    written_unix_s: float | None = None
    consumed_tokens: int | None = None
    round: int | None = None
    pin_reason: str | None = None
    problem: str | None = None
    verification: Verification | None = None
    """What came out when it was read and compared; None where that was never done."""

    @property
    def name(self) -> str:
        return f"{self.branch}/{self.place.name}"


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything below a directory of checkpoints. Branches by name; the checkpoints of each by step."""

    current: str | None
    branches: tuple[Branch, ...]
    checkpoints: tuple[FoundCheckpoint, ...]
    resume: ResumePoint


def survey(checkpoints: Location) -> Survey:
    """Look at all branches and checkpoints of a run.

    Raises: CheckpointError when a BRANCH file is damaged or something cannot be read.
    """
    branches = list_branches(checkpoints)
    current: str | None = None
    line: set[tuple[str, int]] = set()
    with suppress(CheckpointError):  # the resume point tells what is wrong
        current = current_branch(checkpoints) if branches else None
        line = {(one.branch, one.step) for one in candidates(checkpoints)}
    verified = known_verifications(checkpoints)
    found = [
        _look(
            branch.name,
            step,
            entry,
            is_in_line=(branch.name, step) in line,
            verification=verified.get((branch.name, step)),
        )
        for branch in branches
        for entry in (checkpoints / branch.name).entries()
        if (step := step_of(entry.name)) is not None
    ]
    return Survey(current, tuple(branches), tuple(found), resume_point(checkpoints))


def stored_bytes(manifest: Manifest) -> int:
    """Return the bytes of all files that a manifest lists."""
    return sum(entry.size for entry in manifest.files.values())


def _look(
    branch: str, step: int, place: Location, *, is_in_line: bool, verification: Verification | None
) -> FoundCheckpoint:
    try:
        if not is_committed(place):
            state = CheckpointState.UNFINISHED if is_unfinished(place) else CheckpointState.UNCOMMITTED
            num_bytes = sum(entry.size() or 0 for entry in place.entries())
            return FoundCheckpoint(branch, step, place, state, is_in_line, num_bytes)
        manifest = read_manifest(place, branch=branch)
    except CheckpointError as error:
        return FoundCheckpoint(branch, step, place, CheckpointState.DAMAGED, is_in_line, 0, problem=str(error))
    if verification is not None and not verification.is_of(manifest.written_unix_s):
        verification = None
    state = CheckpointState.PINNED if is_pinned(place) else CheckpointState.COMMITTED
    reason, problem = None, None
    try:
        reason = pin_reason(place)
    except CheckpointError as error:
        problem = str(error)
    return FoundCheckpoint(
        branch=branch,
        step=step,
        place=place,
        state=CheckpointState.DAMAGED if verification is not None and verification.problem else state,
        is_in_line=is_in_line,
        num_bytes=stored_bytes(manifest),
        written_unix_s=manifest.written_unix_s,
        consumed_tokens=manifest.consumed_tokens,
        round=manifest.round,
        pin_reason=reason,
        problem=problem,
        verification=verification,
    )
