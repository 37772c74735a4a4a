"""Finds the checkpoints that a job may start from. Rank 0 reads storage and broadcasts the result to all ranks.

The checkpoints of this run come first, the newest of its branch first (checkpoint_format/lineage.py). Another run's
checkpoint, named by checkpoint.load, is used only while this run has none.

A rollback goes back to a step before training went wrong: only older checkpoints remain to start from, and samples are
skipped. A rollback is done once: the branch that it opens records the rollback's id, and a job that finds this id in
the lineage resumes on that branch. start_order.py computes the sample order from there on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain.checkpoint.agreement import result_of_rank_0
from megatrain.checkpoint.continued_stream import with_later_stages
from megatrain.checkpoint_format.branches import MAIN_BRANCH, Branch, ancestry
from megatrain.checkpoint_format.checkpoint_files import read_manifest, wrong_files
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.commit import commit_problem
from megatrain.checkpoint_format.lineage import (
    Candidate,
    candidates,
    ensure_branch,
    newer_without_commit,
    recorded_order,
    unfinished,
)
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.resume_point import known_damage
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.checkpoint_format.url_location import open_location
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.records.rounds import Rollback
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.formatting import problems_text


@dataclass(frozen=True, slots=True)
class StorageCandidate:
    """A checkpoint to start from. `is_own`: this run wrote it.

    `damage`: known damage; a damaged candidate is tried last.
    """

    branch: str
    step: int
    location: str
    is_own: bool
    damage: str = ""


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The branch to resume, and the candidates to resume from, best first.

    `last_round`: the round that wrote this run's newest readable checkpoint, -1 without one.
    """

    branch: str
    branch_created_unix_s: float
    candidates: tuple[StorageCandidate, ...]
    last_round: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """Messages to log if the job resumes from storage."""
    rollbacks: tuple[str, ...] = ()
    """Ids of the rollbacks in the branch's ancestry."""
    skipped: SampleRanges = ()
    """Samples that the branch leaves out."""
    stream: SampleStream | None = None
    """The sample order of the newest readable checkpoint, at cursor `consumed_samples`, with the stages that newer
    branches recorded after it. Without a checkpoint, the order that the newest branch recorded; None without one.
    """
    consumed_samples: int = 0

    @property
    def newest_step(self) -> int:
        """The step of this run's newest checkpoint, -1 without one."""
        return max((candidate.step for candidate in self.candidates if candidate.is_own), default=-1)

    def begun_at(self, first_sample: int) -> StartingPoint:
        """Return the starting point of a run that begins at this sample of another run's order."""
        return replace(self, consumed_samples=max(self.consumed_samples, first_sample))

    def in_turn(self) -> list[tuple[int, StorageCandidate]]:
        """Return the candidates with their indices, in the order in which they are tried.

        Candidates with known damage come last, because they may have been repaired since.
        """
        return sorted(enumerate(self.candidates), key=lambda candidate: bool(candidate[1].damage))

    def skip_notes(self, taken: int, problems: Mapping[int, str]) -> list[str]:
        """Return warnings about better candidates than the one at `taken`, and about those that failed to load."""
        skipped = {index: candidate.damage for index, candidate in enumerate(self.candidates[:taken])} | dict(problems)
        return [
            f"WARNING: {self.candidates[index].location} is damaged and was skipped: {skipped[index]}"
            for index in sorted(skipped)
        ]


def read_storage(checkpoints: Location, settings: CheckpointConfig, rank: int, cpu_groups: CpuGroups) -> StartingPoint:
    """Return the starting point that storage offers, the same on every rank. Opens the first branch of a new run.

    Communication: one broadcast.
    Raises: CheckpointError on every rank.
    """
    received: dict[str, Any] = result_of_rank_0(
        cpu_groups, rank, lambda: asdict(_starting_point(checkpoints, settings))
    )
    stream = received["stream"]
    return StartingPoint(
        branch=received["branch"],
        branch_created_unix_s=received["branch_created_unix_s"],
        candidates=tuple(StorageCandidate(**candidate) for candidate in received["candidates"]),
        last_round=received["last_round"],
        warnings=tuple(received["warnings"]),
        notes=tuple(received["notes"]),
        rollbacks=tuple(received["rollbacks"]),
        skipped=tuple((first, end) for first, end in received["skipped"]),
        stream=None if stream is None else SampleStream.from_dict(stream),
        consumed_samples=received["consumed_samples"],
    )


def shared_manifest(candidate: StorageCandidate, job: str, rank: int, cpu_groups: CpuGroups) -> Manifest:
    """Return a candidate's manifest on every rank. Rank 0 reads it, and checks COMMIT and the sizes of the files.

    Communication: one broadcast.
    Raises: CheckpointError on every rank.
    """
    location = open_location(candidate.location)
    text: str = result_of_rank_0(cpu_groups, rank, lambda: _checked_manifest(location, candidate, job).to_json())
    return Manifest.from_json(text, candidate.location)


def _checked_manifest(location: Location, candidate: StorageCandidate, job: str) -> Manifest:
    # a checkpoint copied here from another run may be named by checkpoint.load, but this run must not resume from it
    expected = {"job": job, "branch": candidate.branch} if candidate.is_own else {}
    manifest = read_manifest(location, **expected)
    problem = commit_problem(location)
    problems = [problem] if problem is not None else wrong_files(location, manifest)
    if problems:
        raise CheckpointError(problems_text(problems, 5))
    return manifest


def _starting_point(checkpoints: Location, settings: CheckpointConfig) -> StartingPoint:
    own = candidates(checkpoints)
    if own and not settings.resume:
        raise CheckpointError(
            f"{checkpoints} holds checkpoints up to {own[0].branch}/{own[0].location.name}, but "
            "checkpoint.resume=false; resume, or name another job.run_directory for a new run"
        )
    notes = [f"{location} was never finished and is not read" for location in unfinished(checkpoints)]
    branch = ensure_branch(checkpoints, "start of the run")
    # checkpoints that were complete once and lost their COMMIT or manifest; they are tried first, so that the log has
    # the reason why each one is skipped
    lost = newer_without_commit(checkpoints, own[0]) if own else []
    damage = known_damage(checkpoints, own)
    found = [
        StorageCandidate(
            candidate.branch,
            candidate.step,
            str(candidate.location),
            is_own=True,
            damage=damage.get((candidate.branch, candidate.step), ""),
        )
        for candidate in (*lost, *own)
    ]
    if not found and settings.load:
        found = [_named(settings.load)]
    branches = ancestry(checkpoints, branch)
    newest = _newest_manifest(own)
    order = recorded_order(branches)
    return StartingPoint(
        branch=branch,
        branch_created_unix_s=branches[0].created_unix_s,
        candidates=tuple(found),
        last_round=-1 if newest is None else newest[1].round,
        warnings=_warnings(checkpoints / branch),
        notes=tuple(notes),
        rollbacks=tuple(member.rollback for member in branches if member.rollback),
        skipped=() if order is None else order.skipped,
        stream=order if newest is None else _stream_of(*newest, branches),
        consumed_samples=0 if newest is None else newest[1].consumed_samples,
    )


def _warnings(branch: Location) -> tuple[str, ...]:
    """Return early warnings of problems that would otherwise appear at the first checkpoint, maybe hours later.

    Training starts anyway.
    """
    if isinstance(branch, LocalLocation) and not os.access(branch.path, os.W_OK | os.X_OK):
        return (f"WARNING: {branch} cannot be written, so no checkpoint will reach storage until this is fixed",)
    return ()


def _newest_manifest(own: Sequence[Candidate]) -> tuple[Candidate, Manifest] | None:
    for candidate in own:
        with suppress(CheckpointError):  # reported when the candidate is tried
            return candidate, read_manifest(candidate.location)
    return None


def _stream_of(candidate: Candidate, manifest: Manifest, branches: Sequence[Branch]) -> SampleStream:
    """Return a checkpoint's sample order with the stages that newer branches recorded. `branches`: newest first."""
    names = [member.name for member in branches]
    later = recorded_order(branches[: names.index(candidate.branch)])
    return with_later_stages(manifest.data, later, manifest.consumed_samples)


def _named(load: str) -> StorageCandidate:
    location = open_location(load)
    problem = commit_problem(location)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint.load={load!r} is not a complete checkpoint: {problem}; name a directory like "
            f"runs/<job>/checkpoints/{MAIN_BRANCH}/{step_directory_name(120)}"
        )
    return StorageCandidate("", read_manifest(location).step, str(location), is_own=False)


def pending_rollback(rollback: Rollback | None, start: StartingPoint) -> Rollback | None:
    """Return the rollback if the branch to resume has not recorded it yet; None if there is nothing to do."""
    return None if rollback is None or rollback.rollback_id in start.rollbacks else rollback


def rollback_start(start: StartingPoint, rollback: Rollback, settings: CheckpointConfig) -> StartingPoint:
    """Return `start` with only the checkpoints up to the rollback's step. Without any, the job starts from scratch.

    That is correct only if the first checkpoint was due after that step. Otherwise the checkpoint that the job needs
    was removed or lost.
    Raises: CheckpointError when all checkpoints are newer than that step, and an older one should exist.
    """
    found = tuple(
        candidate for candidate in start.candidates if not candidate.is_own or candidate.step <= rollback.to_step
    )
    if start.candidates and not found and (settings.interval <= rollback.to_step or settings.load):
        oldest = min(candidate.step for candidate in start.candidates)
        raise CheckpointError(
            f"training went wrong after step {rollback.to_step}, and the oldest checkpoint left is of step {oldest}; "
            "keep more of them (checkpoint.keep_last, keep_every), or begin another run with checkpoint.load"
        )
    return replace(start, candidates=found)
