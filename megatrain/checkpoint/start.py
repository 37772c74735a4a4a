"""What a job may start from, as rank 0 finds it in storage and tells all.

Checkpoints of this run come first, newest of its branch first (contracts/lineage.py); another run's, named by
checkpoint.load, counts only while this run has none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.checkpoint.agreement import asked_by_first
from megatrain.checkpoint.url_location import open_location
from megatrain.comm.host_groups import HostGroups
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.contracts.branches import MAIN_BRANCH, line_of
from megatrain.contracts.checkpoint_files import commit_problem, read_manifest, step_directory_name, wrong_files
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import Candidate, candidates, ensure_branch, overlooked, skipped_samples, unfinished
from megatrain.contracts.location import LocalLocation, Location
from megatrain.contracts.manifest import Manifest
from megatrain.contracts.resume_point import known_damage
from megatrain.contracts.sample_ranges import SampleRanges


@dataclass(frozen=True, slots=True)
class StorageCandidate:
    """A committed checkpoint. `is_own`: of this run. `damage`: what is known to be wrong with it; it is tried last."""

    branch: str
    step: int
    place: str
    is_own: bool
    damage: str = ""


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The branch to go on with, and what it may go on from, best first. `last_round` wrote the newest of them."""

    branch: str
    branch_created_unix_s: float
    candidates: tuple[StorageCandidate, ...]
    last_round: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What is worth telling when storage is read."""
    rollbacks: tuple[str, ...] = ()
    """For which the line of the branch went back."""
    skipped: SampleRanges = ()
    """That it leaves out."""

    @property
    def newest_step(self) -> int:
        """The step of this run's newest checkpoint, -1 without one."""
        return max((one.step for one in self.candidates if one.is_own), default=-1)

    def in_turn(self) -> list[tuple[int, StorageCandidate]]:
        """Return the candidates with their places, in the order in which they are tried.

        What is known to be damaged comes last: it may have been mended since.
        """
        return sorted(enumerate(self.candidates), key=lambda one: bool(one[1].damage))

    def skip_notes(self, taken: int, problems: Mapping[int, str]) -> list[str]:
        """Return what to say of better candidates than the one at `taken`, and of those that were tried in vain."""
        skipped = {place: one.damage for place, one in enumerate(self.candidates[:taken])} | dict(problems)
        return [
            f"WARNING: {self.candidates[place].place} is damaged and was skipped: {skipped[place]}"
            for place in sorted(skipped)
        ]


def read_storage(checkpoints: Location, settings: CheckpointConfig, rank: int, host: HostGroups) -> StartingPoint:
    """Return what is in storage, the same on every rank; a new run's first branch is opened.

    Communication: one broadcast.
    Raises: CheckpointError on every rank.
    """
    told: dict[str, Any] = asked_by_first(host, rank, lambda: asdict(_look(checkpoints, settings)))
    return StartingPoint(
        branch=told["branch"],
        branch_created_unix_s=told["branch_created_unix_s"],
        candidates=tuple(StorageCandidate(**one) for one in told["candidates"]),
        last_round=told["last_round"],
        warnings=tuple(told["warnings"]),
        notes=tuple(told["notes"]),
        rollbacks=tuple(told["rollbacks"]),
        skipped=tuple((first, end) for first, end in told["skipped"]),
    )


def told_manifest(candidate: StorageCandidate, job: str, rank: int, host: HostGroups) -> Manifest:
    """Return a manifest that is vouched for and whose files have their sizes, on every rank as rank 0 reads it.

    Communication: one broadcast.
    Raises: CheckpointError on every rank.
    """
    place = open_location(candidate.place)
    text: str = asked_by_first(host, rank, lambda: _whole_manifest(place, candidate, job).to_json())
    return Manifest.from_json(text, candidate.place)


def _whole_manifest(place: Location, candidate: StorageCandidate, job: str) -> Manifest:
    # what was copied here from another run may be named by checkpoint.load, and is nothing to resume from
    expected = {"job": job, "branch": candidate.branch} if candidate.is_own else {}
    manifest = read_manifest(place, **expected)
    problem = commit_problem(place)
    problems = [problem] if problem is not None else wrong_files(place, manifest)
    if problems:
        raise CheckpointError("; ".join(problems[:5]))
    return manifest


def _look(checkpoints: Location, settings: CheckpointConfig) -> StartingPoint:
    own = candidates(checkpoints)
    if own and not settings.resume:
        raise CheckpointError(
            f"{checkpoints} holds checkpoints up to {own[0].branch}/{own[0].location.name}, but "
            "checkpoint.resume=false; resume, or name another job.run_directory for a new run"
        )
    notes = [f"{place} was never finished and is not read" for place in unfinished(checkpoints)]
    branch = ensure_branch(checkpoints, "start of the run")
    # the writer may have reported these as stored: they are tried, so that the log says what became of them
    lost = overlooked(checkpoints, own[0]) if own else []
    damage = known_damage(checkpoints, own)
    found = [
        StorageCandidate(
            one.branch, one.step, str(one.location), is_own=True, damage=damage.get((one.branch, one.step), "")
        )
        for one in (*lost, *own)
    ]
    if not found and settings.load:
        found = [_named(settings.load)]
    line = line_of(checkpoints, branch)
    return StartingPoint(
        branch=branch,
        branch_created_unix_s=line[0].created_unix_s,
        candidates=tuple(found),
        last_round=_last_round(own),
        warnings=_warnings(checkpoints / branch),
        notes=tuple(notes),
        rollbacks=tuple(member.rollback for member in line if member.rollback),
        skipped=skipped_samples(line),
    )


def _warnings(branch: Location) -> tuple[str, ...]:
    """Return warnings for now that would otherwise come with the first checkpoint, hours later. Training starts
    anyway."""
    if isinstance(branch, LocalLocation) and not os.access(branch.path, os.W_OK | os.X_OK):
        return (f"WARNING: {branch} cannot be written, so no checkpoint will get to storage until that is mended",)
    return ()


def _last_round(own: Sequence[Candidate]) -> int:
    for one in own:
        with suppress(CheckpointError):  # reported when it is tried
            return read_manifest(one.location).round
    return -1


def _named(load: str) -> StorageCandidate:
    place = open_location(load)
    problem = commit_problem(place)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint.load={load!r} is not a complete checkpoint: {problem}; name a directory like "
            f"runs/<job>/checkpoints/{MAIN_BRANCH}/{step_directory_name(120)}"
        )
    return StorageCandidate("", read_manifest(place).step, str(place), is_own=False)
