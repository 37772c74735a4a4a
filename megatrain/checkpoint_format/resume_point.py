"""Find the checkpoint that a job would resume from. A job tries candidates in lineage order and skips damaged ones.

The checks are cheap: they read manifests, the file sizes of the candidates that a job would try, and the recorded
results of `megatrain ckpt verify`. Only that command reads whole files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatrain.checkpoint_format.checkpoint_files import read_manifest, wrong_files
from megatrain.checkpoint_format.commit import commit_problem
from megatrain.checkpoint_format.lineage import Candidate, candidates, current_branch, newer_without_commit
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.verifications import known_verifications
from megatrain.contracts.errors import CheckpointError
from megatrain.formatting import time_text


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a job would resume from, or None; the reason; and the checkpoints it would skip."""

    candidate: Candidate | None
    reason: str
    skipped: tuple[str, ...] = ()
    is_unreadable: bool = False
    """Whether the existing checkpoints cannot be determined; `reason` has the cause."""

    @property
    def damage(self) -> str:
        """Why a job would skip the newest checkpoint, and the one it would resume from; "" if it skips none."""
        if self.is_unreadable:
            return f"no checkpoint can be found: {self.reason}"
        if not self.skipped:
            return ""
        if self.candidate is None:
            return f"NO CHECKPOINT CAN BE LOADED: {self.reason}; {self.skipped[0]}"
        return f"{self.skipped[0]}; a job would resume from step {self.candidate.step:,}"


def resume_point(checkpoints: Location) -> ResumePoint:
    """Return the checkpoint that a job would resume from, and why."""
    try:
        found = candidates(checkpoints)
        lost = newer_without_commit(checkpoints, found[0]) if found else []
        current = current_branch(checkpoints)
    except CheckpointError as error:
        return ResumePoint(None, str(error), is_unreadable=True)
    skipped = [
        f"{candidate.branch}/{candidate.location.name} is skipped: {commit_problem(candidate.location)}"
        for candidate in lost
    ]
    for candidate, problem in with_problems(checkpoints, found):
        if problem is not None:
            skipped.append(f"{candidate.branch}/{candidate.location.name} is skipped: {problem}")
            continue
        reason = (
            f"the newest committed checkpoint of {current}, the current branch"
            if candidate.branch == current
            else f"{current}, the current branch, has no usable checkpoint; the newest of its ancestry is on"
            f" {candidate.branch}"
        )
        return ResumePoint(candidate, reason, tuple(skipped))
    if skipped:
        return ResumePoint(None, "every committed checkpoint of the current ancestry is damaged", tuple(skipped))
    return ResumePoint(None, "nothing was saved yet: a job starts from scratch")


def with_problems(checkpoints: Location, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str | None]]:
    """Yield each candidate with the reason why a job would skip it, or None. A candidate is examined when yielded."""
    damage = known_damage(checkpoints, found)
    for candidate in found:
        yield candidate, _size_problem(candidate) or damage.get((candidate.branch, candidate.step))


def known_damage(checkpoints: Location, found: Iterable[Candidate]) -> dict[tuple[str, int], str]:
    """Return the damage that `megatrain ckpt verify` has recorded for these candidates, by branch and step."""
    verified, damage = known_verifications(checkpoints), {}
    for candidate in found:
        known = verified.get((candidate.branch, candidate.step))
        if known is None or not known.problem:
            continue
        with suppress(CheckpointError):  # the reader of the checkpoint reports a damaged manifest
            if known.applies_to(read_manifest(candidate.location).written_unix_s):
                found_at = time_text(known.at_unix_s)
                damage[candidate.branch, candidate.step] = (
                    f"`megatrain ckpt verify` found it damaged at {found_at}: {known.problem}"
                )
    return damage


def _size_problem(candidate: Candidate) -> str | None:
    """Return a problem of a checkpoint's manifest or of its files' sizes, None without one."""
    try:
        manifest = read_manifest(candidate.location, branch=candidate.branch)
        problems = wrong_files(candidate.location, manifest)
    except CheckpointError as error:
        return str(error)
    return problems[0] if problems else None
