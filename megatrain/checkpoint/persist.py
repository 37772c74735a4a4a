"""Writes one snapshot from this host's slots to storage, until the checkpoint is committed.

The writers of all hosts work on a checkpoint at the same time. The coordinator is the writer on the host of rank 0.

    every writer     WRITING, the data files of its ranks, host-*.done; then it waits for COMMIT
    the coordinator  also metadata, index and tokenizer; when all hosts are done, the manifest; COMMIT last

A writer may be killed at any moment. Until COMMIT exists, no reader uses any of the files. A writer that starts after a
crash begins again, or continues if this host's files are done. File names contain the round, so that rounds that save
the same step do not collide; COMMIT is created exclusively, so that only one round commits. A writer that fails removes
only its own files, and none to which a COMMIT may refer: none after its host has reported done (the coordinator: none
after it has tried to write COMMIT).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.arena.directory import Arena
from megatrain.checkpoint.other_hosts import OtherHosts
from megatrain.checkpoint.persist_policy import DueSnapshot
from megatrain.checkpoint.write_marks import (
    DoneMark,
    WritingMark,
    claim,
    done_name,
    failed_name,
    is_leftover,
    is_mark,
    is_small_file,
    write_failed,
)
from megatrain.checkpoint.written_files import small_files, write_slots
from megatrain.checkpoint_format.branches import Branch, read_branch, write_branch
from megatrain.checkpoint_format.checkpoint_files import (
    expose_metadata,
    manifest_location,
    read_manifest,
    write_manifest,
    wrong_files,
)
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.claims import Claims
from megatrain.checkpoint_format.commit import Commit, is_committed, matching_commit, read_commit, write_commit
from megatrain.checkpoint_format.data_file import content_digest, data_file_name
from megatrain.checkpoint_format.location import Location, put_once
from megatrain.checkpoint_format.manifest import FileEntry, Manifest
from megatrain.checkpoint_format.removals import check_not_being_removed
from megatrain.checkpoint_format.round_starts import RoundStart, begin_round, is_superseded, round_starts
from megatrain.contracts.errors import CheckpointError, MissingFileError


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The bytes and the time of this host's writes, zero when the checkpoint was complete already; and log messages."""

    num_bytes: int
    write_s: float
    notes: tuple[str, ...]


class Persistence:
    """Writes one snapshot to storage.

    `reason_to_stop_waiting`: returns why this writer must not wait for other hosts any longer, "" while it may.
    `branch`: the content of the branch's BRANCH file when the round began, None when that is unknown.
    """

    def __init__(
        self,
        arena: Arena,
        due: DueSnapshot,
        checkpoints: Location,
        reason_to_stop_waiting: Callable[[], str],
        branch: Branch | None = None,
    ) -> None:
        self._arena = arena
        self._snapshot = due.snapshot
        self._slots = due.slots
        self._plan = due.plan
        self._checkpoints = checkpoints
        self._directory = checkpoints / due.plan.branch / step_directory_name(due.snapshot.step)
        self._others = OtherHosts(self._directory, due.snapshot, due.plan, self._valid_commit, reason_to_stop_waiting)
        self._branch = branch
        self._may_remove_own_files = True
        """Whether no COMMIT can refer to this host's files. After the host has reported done, only the coordinator can
        exclude that.
        """

    def run(self) -> WriteResult:
        """Write this host's part, and return when the checkpoint is committed, by this writer or by the coordinator.

        Raises: CheckpointError; this host's files are removed where that is safe.
        """
        self._claim_and_check_round()
        if self._is_complete():
            return WriteResult(0, 0.0, tuple(self._tidy()))
        self._write_writing_mark()
        try:
            if self._plan.is_coordinator:
                self._check_branch()
            mark = self._write_files()
            if self._plan.is_coordinator:
                self._commit()
            else:
                self._others.await_commit()
        except CheckpointError as error:
            problems = self._give_up(str(error))
            raise CheckpointError("; ".join([str(error), *problems])) from error
        num_bytes = sum(entry.size for entry in mark.files.values())
        return WriteResult(num_bytes, mark.write_s, tuple(self._tidy()))

    def _is_complete(self) -> bool:
        """Return whether this step is committed already: by a writer that was killed later, or by an older round."""
        commit = self._valid_commit()
        if commit is None:
            return False
        manifest = read_manifest(self._directory, job=self._plan.job, branch=self._plan.branch)
        problems = wrong_files(self._directory, manifest)
        if problems:
            raise CheckpointError(f"{problems[0]}; {self._directory} is committed but damaged: remove it")
        return manifest.round <= self._snapshot.round

    def _check_branch(self) -> None:
        """Make sure that readers will find the checkpoint: its branch must exist. Raises: CheckpointError."""
        try:
            read_branch(self._checkpoints, self._plan.branch)
        except MissingFileError:
            if self._branch is None:
                raise
            # a user has removed the directory while the job runs
            write_branch(self._checkpoints, self._branch)

    def _claim_and_check_round(self) -> None:
        """Claim the round's number if the round could not do so when it began, because storage was unavailable.

        Raises: CheckpointError if another process has claimed that number, if a newer round supersedes this round, or
        if a former checkpoint of this step is being removed.
        """
        plan = self._plan
        if plan.claim and plan.is_coordinator:
            location = Claims(self._checkpoints).location_of(plan.round)
            if not location.exists() and put_once(location, plan.claim.encode()):
                begin_round(self._checkpoints, RoundStart(plan.round, plan.branch, plan.began_at_step))
            if location.read() != plan.claim.encode():
                raise CheckpointError(f"{location}: another process has claimed round {plan.round}; this one must stop")
        check_not_being_removed(self._checkpoints, plan.branch, self._snapshot.step)
        for start in self._starts():
            if is_superseded(self._snapshot.step, self._snapshot.round, [start]):
                raise CheckpointError(
                    f"{self._directory}: round {start.round} resumed from step {start.step} of {start.branch}, and"
                    f" round {self._snapshot.round} is older; this process is left over from it and must stop"
                )

    def _starts(self, after: int | None = None) -> list[RoundStart]:
        round_number = self._snapshot.round if after is None else after
        return round_starts(self._checkpoints, self._plan.branch, round_number)

    def _valid_commit(self) -> Commit | None:
        """Return COMMIT if it matches the manifest that it names and its round is not superseded, else None."""
        commit = matching_commit(self._directory)
        if commit is None or is_superseded(self._snapshot.step, commit.round, self._starts(commit.round)):
            return None
        return commit

    # This host's files

    def _write_files(self) -> DoneMark:
        mark = DoneMark.read(self._directory, self._snapshot, self._plan.host_index)
        if mark is not None and self._has_all(mark):
            self._may_remove_own_files = self._plan.is_coordinator
            return mark
        for name in (done_name, failed_name):
            (self._directory / name(self._snapshot.round, self._plan.host_index)).remove()
        started = time.perf_counter()
        files = write_slots(self._arena, self._directory, self._snapshot, self._slots)
        mark = DoneMark(self._snapshot, self._plan.host_index, time.perf_counter() - started, files)
        self._may_remove_own_files = self._plan.is_coordinator
        mark.write(self._directory)
        return mark

    def _has_all(self, mark: DoneMark) -> bool:
        return all((self._directory / name).size() == entry.size for name, entry in mark.files.items())

    # The whole checkpoint

    def _commit(self) -> None:
        small = small_files(self._arena, self._snapshot.round, self._plan.tokenizer)
        for name, content in small.items():
            self._write_writing_mark()
            (self._directory / name).write(content)
        files = {name: FileEntry(len(content), content_digest(content)) for name, content in small.items()}
        for mark in self._others.await_done():
            twice = sorted(files.keys() & mark.files.keys())
            if twice:
                raise CheckpointError(f"{self._directory / twice[0]}: written by two hosts; host.json is wrong")
            files.update(mark.files)
        manifest = self._manifest(files)
        self._write_writing_mark()
        write_manifest(self._directory, manifest, is_superseded=self._has_superseded_commit())
        self._check_in_place(manifest)
        self._claim_and_check_round()
        self._may_remove_own_files = False
        write_commit(self._directory, manifest, is_superseded=self._has_superseded_commit())

    def _write_writing_mark(self) -> None:
        """Write WRITING, unless this round has written it already. Raises: CheckpointError, see `claim`."""
        mark = WritingMark(self._snapshot.round, self._plan.job, time.time())
        claim(self._directory, mark, is_superseded=self._has_superseded_commit())

    def _has_superseded_commit(self) -> bool:
        commit = read_commit(self._directory)
        return commit is not None and is_superseded(self._snapshot.step, commit.round, self._starts(commit.round))

    def _manifest(self, files: dict[str, FileEntry]) -> Manifest:
        slot_words, template = self._slots[0].words, self._plan.manifest
        return Manifest(
            job=self._plan.job,
            branch=self._plan.branch,
            round=self._snapshot.round,
            step=self._snapshot.step,
            consumed_samples=slot_words.consumed_samples,
            consumed_tokens=slot_words.consumed_tokens,
            num_updates=slot_words.num_updates,
            num_skipped=slot_words.num_skipped,
            written_unix_s=time.time(),
            has_optimizer=template.has_optimizer,
            data=template.data,
            mesh=template.mesh,
            config_hash=template.config_hash,
            config=template.config,
            versions=template.versions,
            files=files,
        )

    def _check_in_place(self, manifest: Manifest) -> None:
        """Check before COMMIT that all files exist: another process may have removed some."""
        for name in sorted(manifest.files.keys() - {entry.name for entry in self._directory.entries()}):
            raise CheckpointError(
                f"{self._directory / name}: was removed after it was written; another process works in this directory,"
                " and one of the two must stop"
            )

    # Afterwards

    def _tidy(self) -> list[str]:
        """Make the complete checkpoint readable for torch, and remove leftover files. Returns the problems.

        Only the coordinator does this, also if an earlier writer has committed the checkpoint.
        """
        if not self._plan.is_coordinator:
            return []
        try:
            manifest = read_manifest(self._directory)
            expose_metadata(self._directory, manifest)
            kept = {*manifest.files, manifest_location(self._directory).name}
            for entry in self._directory.entries():
                # without exclusive creation, another round's COMMIT may still replace this one: keep that round's files
                is_old = is_leftover(entry.name, manifest.round) and (self._plan.is_exclusive or is_mark(entry.name))
                if is_old and entry.name not in kept:
                    entry.remove()
        except CheckpointError as error:
            return [str(error)]
        return []

    def _give_up(self, problem: str) -> list[str]:
        """Remove this host's files if no COMMIT can refer to them, notify the other hosts, and return the problems."""
        own = (
            done_name(self._snapshot.round, self._plan.host_index),
            *(data_file_name(self._snapshot.round, slot.rank) for slot in self._slots),
        )
        try:
            for entry in self._directory.entries() if self._may_remove_own_files else ():
                if entry.name in own or (self._plan.is_coordinator and is_small_file(entry.name, self._snapshot.round)):
                    entry.remove()
            if self._plan.num_hosts > 1 and not is_committed(self._directory):
                write_failed(self._directory, self._snapshot, self._plan.host_index, problem)
        except CheckpointError as error:
            return [str(error)]
        return []
