"""Which checkpoint a job would go on from. It tries candidates in the order of the lineage and skips a damaged one.

Only what is cheap is looked at: manifests, the sizes of the files of what a job would try, and what
`megatrain ckpt verify` found when it read all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatrain.contracts.checkpoint_files import commit_problem, read_manifest, wrong_files
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import Candidate, candidates, current_branch, overlooked
from megatrain.contracts.location import Location
from megatrain.contracts.texts import time_text
from megatrain.contracts.verifications import known_verifications


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a job would go on from, None for nothing; why, and what it would skip on the way."""

    candidate: Candidate | None
    reason: str
    skipped: tuple[str, ...] = ()
    is_unreadable: bool = False
    """Whether it is unknown which checkpoints there are: `reason` says why."""

    @property
    def damage(self) -> str:
        """Why the newest committed checkpoint is not what a job would go on from, and what is; empty where it is."""
        if self.is_unreadable:
            return f"no checkpoint can be found: {self.reason}"
        if not self.skipped:
            return ""
        if self.candidate is None:
            return f"NO CHECKPOINT CAN BE LOADED: {self.reason}; {self.skipped[0]}"
        return f"{self.skipped[0]}; a job would go on from step {self.candidate.step:,}"


def resume_point(checkpoints: Location) -> ResumePoint:
    """Return what a job would go on from and why."""
    try:
        found = candidates(checkpoints)
        lost = overlooked(checkpoints, found[0]) if found else []
        current = current_branch(checkpoints)
    except CheckpointError as error:
        return ResumePoint(None, str(error), is_unreadable=True)
    skipped = [f"{one.branch}/{one.location.name} is skipped: {commit_problem(one.location)}" for one in lost]
    for candidate, problem in with_problems(checkpoints, found):
        if problem is not None:
            skipped.append(f"{candidate.branch}/{candidate.location.name} is skipped: {problem}")
            continue
        reason = (
            f"the newest committed checkpoint of {current}, the current branch"
            if candidate.branch == current
            else f"{current}, the current branch, has none of its own, and goes on from {candidate.branch}"
        )
        return ResumePoint(candidate, reason, tuple(skipped))
    if skipped:
        return ResumePoint(None, "every committed checkpoint of the current line is damaged", tuple(skipped))
    return ResumePoint(None, "nothing was saved yet: a job starts from scratch")


def with_problems(checkpoints: Location, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str | None]]:
    """Yield each with why a job would skip it, None where it would not. One is looked at when it is asked for."""
    damage = known_damage(checkpoints, found)
    for one in found:
        yield one, _size_problem(one) or damage.get((one.branch, one.step))


def known_damage(checkpoints: Location, found: Iterable[Candidate]) -> dict[tuple[str, int], str]:
    """Return what `megatrain ckpt verify` found wrong with these since they were written, by branch and step."""
    verified, damage = known_verifications(checkpoints), {}
    for one in found:
        known = verified.get((one.branch, one.step))
        if known is None or not known.problem:
            continue
        with suppress(CheckpointError):  # a damaged manifest is told of by whoever reads the checkpoint
            if known.is_of(read_manifest(one.location).written_unix_s):
                found_at = time_text(known.at_unix_s)
                damage[one.branch, one.step] = (
                    f"`megatrain ckpt verify` found it damaged at {found_at}: {known.problem}"
                )
    return damage


def _size_problem(candidate: Candidate) -> str | None:
    """Return what is wrong with a checkpoint's manifest or the sizes of its files, None when nothing is."""
    try:
        manifest = read_manifest(candidate.location, branch=candidate.branch)
        problems = wrong_files(candidate.location, manifest)
    except CheckpointError as error:
        return str(error)
    return problems[0] if problems else None
