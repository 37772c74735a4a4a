"""Stage 2 of one snapshot: from the slots of this host to a committed checkpoint, safe to be killed at any moment.

    every host       WRITING, the data files of its ranks, host-*.done; then it waits for COMMIT
    the coordinator  also metadata and tokenizer; when all hosts are done, the manifest, and last of all COMMIT

Until COMMIT no reader uses any of it, and a writer that starts after a crash begins again, or continues where the host
is done. Names have the round, so that rounds that save the same step do not meet; COMMIT is made exclusively, so that
one of them commits. Nothing is taken away that a COMMIT may vouch for: not another round's, not after a host said done,
not when COMMIT seems to have failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.data_file import content_digest, data_file_name
from megatrain.checkpoint.image_stream import write_data_file
from megatrain.checkpoint.persist_policy import Due, pauses_s
from megatrain.checkpoint.write_marks import (
    DoneMark,
    WritingMark,
    claim,
    done_name,
    failed_name,
    is_leftover,
    is_mark,
    is_small_file,
    read_failed,
    write_failed,
)
from megatrain.contracts.arena import Arena
from megatrain.contracts.arena_plans import RankPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.branches import Branch, read_branch, write_branch
from megatrain.contracts.checkpoint_files import (
    COMMIT_NAME,
    METADATA_NAME,
    TOKENIZER_NAME,
    Commit,
    expose_metadata,
    is_committed,
    manifest_place,
    read_commit,
    read_manifest,
    step_directory_name,
    vouched_commit,
    write_commit,
    write_manifest,
    wrong_files,
)
from megatrain.contracts.claims import Claims
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.location import Location, put_once
from megatrain.contracts.manifest import FileEntry, Manifest, name_in_round
from megatrain.contracts.round_starts import RoundStart, begin_round, is_late, round_starts

_NUM_FILES_AT_ONCE = 4
"""While some wait for the disk, others are read and hashed."""


@dataclass(frozen=True, slots=True)
class Written:
    """What persisting took of this host: nothing when the checkpoint was complete already."""

    num_bytes: int
    write_s: float
    notes: tuple[str, ...]


class Persistence:
    """Brings one snapshot to storage.

    `is_superseded`: whether to wait no longer for other hosts. `branch`: what its branch said of itself before, None
    where that is not known.
    """

    def __init__(
        self,
        arena: Arena,
        due: Due,
        checkpoints: Location,
        is_superseded: Callable[[], bool],
        branch: Branch | None = None,
    ) -> None:
        self._arena = arena
        self._snapshot = due.snapshot
        self._slots = due.slots
        self._plan = due.plan
        self._checkpoints = checkpoints
        self._directory = checkpoints / due.plan.branch / step_directory_name(due.snapshot.step)
        self._is_superseded = is_superseded
        self._branch = branch
        self._is_removable = True
        """Whether no COMMIT can vouch for what this host wrote: only the coordinator knows beyond its own done."""

    def run(self) -> Written:
        """Return when the checkpoint is committed, by this host or by the coordinator.

        Raises: CheckpointError; what this host wrote is removed where that is safe.
        """
        self._check_claim()
        if self._is_complete():
            return Written(0, 0.0, tuple(self._tidy()))
        self._claim()
        try:
            if self._plan.is_coordinator:
                self._check_branch()
            mark = self._write_files()
            if self._plan.is_coordinator:
                self._commit()
            else:
                self._await_commit()
        except CheckpointError as error:
            problems = self._give_up(str(error))
            raise CheckpointError("; ".join([str(error), *problems])) from error
        num_bytes = sum(entry.size for entry in mark.files.values())
        return Written(num_bytes, mark.write_s, tuple(self._tidy()))

    def _is_complete(self) -> bool:
        """Say whether this step is committed already: by a writer that was killed after it, or by an older round."""
        commit = self._commit_that_counts()
        if commit is None:
            return False
        manifest = read_manifest(self._directory, job=self._plan.job, branch=self._plan.branch)
        problems = wrong_files(self._directory, manifest)
        if problems:
            raise CheckpointError(f"{problems[0]}; {self._directory} is committed and damaged: remove it")
        return manifest.round <= self._snapshot.round

    def _check_branch(self) -> None:
        """Make sure that the checkpoint will be found: it must be one of a branch. Raises: CheckpointError."""
        try:
            read_branch(self._checkpoints, self._plan.branch)
        except MissingFileError:
            if self._branch is None:
                raise
            # somebody has removed the directory while the job runs
            write_branch(self._checkpoints, self._branch)

    def _check_claim(self) -> None:
        """Make sure that what this round commits counts. Raises: CheckpointError when a newer one left it behind."""
        plan = self._plan
        if plan.claim and plan.is_coordinator:
            # storage may have been away when the round began
            place = Claims(self._checkpoints).place(plan.round)
            if not place.exists() and put_once(place, plan.claim.encode()):
                begin_round(self._checkpoints, RoundStart(plan.round, plan.branch, plan.began_at_step))
            if place.read() != plan.claim.encode():
                raise CheckpointError(f"{place}: another process has claimed round {plan.round}; this one must stop")
        for start in self._starts():
            if is_late(self._snapshot.step, self._snapshot.round, [start]):
                raise CheckpointError(
                    f"{self._directory}: round {start.round} went on from step {start.step} of {start.branch}, and"
                    f" round {self._snapshot.round} is older; this process was left behind and must stop"
                )

    def _starts(self, after: int | None = None) -> list[RoundStart]:
        round_number = self._snapshot.round if after is None else after
        return round_starts(self._checkpoints, self._plan.branch, round_number)

    def _commit_that_counts(self) -> Commit | None:
        """Return COMMIT when it vouches for the checkpoint and is not late."""
        commit = vouched_commit(self._directory)
        if commit is None or is_late(self._snapshot.step, commit.round, self._starts(commit.round)):
            return None
        return commit

    # This host's files

    def _write_files(self) -> DoneMark:
        mark = DoneMark.read(self._directory, self._snapshot, self._plan.host_index)
        if mark is not None and self._has_all(mark):
            self._is_removable = self._plan.is_coordinator
            return mark
        for name in (done_name, failed_name):
            (self._directory / name(self._snapshot.round, self._plan.host_index)).remove()
        started = time.perf_counter()
        with ExitStack() as stack, ThreadPoolExecutor(_NUM_FILES_AT_ONCE, "file") as pool:
            # all are opened first: whatever takes their names later, these are read to the end
            opened = [self._open(slot.path, slot.rank, stack) for slot in self._slots]
            entries = list(pool.map(self._write_file, opened))
        files = {self._file_name(plan.rank): entry for (plan, _), entry in zip(opened, entries, strict=True)}
        mark = DoneMark(self._snapshot, self._plan.host_index, time.perf_counter() - started, files)
        self._is_removable = self._plan.is_coordinator
        mark.write(self._directory)
        return mark

    def _has_all(self, mark: DoneMark) -> bool:
        return all((self._directory / name).size() == entry.size for name, entry in mark.files.items())

    def _open(self, path: Path, rank: int, stack: ExitStack) -> tuple[RankPlan, SlotReader]:
        place = self._arena.rank_plan(rank)
        plan = RankPlan.read(place)
        slot = stack.enter_context(SlotReader(path))
        if (plan.rank, plan.plan_digest) != (slot.header.rank, slot.header.plan_digest):
            raise CheckpointError(
                f"{path}: its plan is not the one in {place}; it is of a layout that the job has left"
            )
        return plan, slot

    def _write_file(self, opened: tuple[RankPlan, SlotReader]) -> FileEntry:
        plan, slot = opened
        return write_data_file(self._directory / self._file_name(plan.rank), slot, plan, self._snapshot)

    def _file_name(self, rank: int) -> str:
        return data_file_name(self._snapshot.round, rank)

    # The whole checkpoint

    def _commit(self) -> None:
        fixed = {self._name_of(METADATA_NAME): _read(self._arena.metadata(self._snapshot.round))}
        if self._plan.tokenizer:
            fixed[self._name_of(TOKENIZER_NAME)] = _read(Path(self._plan.tokenizer))
        for name, content in fixed.items():
            self._claim()
            (self._directory / name).write(content)
        files = {name: FileEntry(len(content), content_digest(content)) for name, content in fixed.items()}
        for mark in self._await_done():
            twice = sorted(files.keys() & mark.files.keys())
            if twice:
                raise CheckpointError(f"{self._directory / twice[0]}: written by two hosts; host.json is at fault")
            files.update(mark.files)
        manifest = self._manifest(files)
        self._claim()
        write_manifest(self._directory, manifest, is_late=self._has_late_commit())
        self._check_in_place(manifest)
        self._check_claim()
        self._is_removable = False
        write_commit(self._directory, manifest, is_late=self._has_late_commit())

    def _name_of(self, name: str) -> str:
        return name_in_round(name, self._snapshot.round)

    def _claim(self) -> None:
        mark = WritingMark(self._snapshot.round, self._plan.job, time.time())
        claim(self._directory, mark, is_late=self._has_late_commit())

    def _has_late_commit(self) -> bool:
        commit = read_commit(self._directory)
        return commit is not None and is_late(self._snapshot.step, commit.round, self._starts(commit.round))

    def _manifest(self, files: dict[str, FileEntry]) -> Manifest:
        words, template = self._slots[0].words, self._plan.manifest
        return Manifest(
            job=self._plan.job,
            branch=self._plan.branch,
            round=self._snapshot.round,
            step=self._snapshot.step,
            consumed_samples=words.consumed_samples,
            consumed_tokens=words.consumed_tokens,
            num_updates=words.num_updates,
            num_skipped=words.num_skipped,
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
        """Look once more before COMMIT: somebody may have removed what an attempt has written."""
        for name in sorted(manifest.files.keys() - {entry.name for entry in self._directory.entries()}):
            raise CheckpointError(
                f"{self._directory / name}: gone since it was written; another process works in this directory, and one"
                " of the two must stop"
            )

    # Other hosts

    def _await_done(self) -> list[DoneMark]:
        """Return the marks of all hosts, as soon as they are there."""
        marks: dict[int, DoneMark] = {}
        others = range(self._plan.num_hosts)

        def look() -> bool:
            names = self._names()
            if COMMIT_NAME in names and self._commit_that_counts() is not None:
                raise CheckpointError(f"{self._directory}: committed by another round; this writer was left behind")
            for index in others:
                if index not in marks and done_name(self._snapshot.round, index) in names:
                    mark = DoneMark.read(self._directory, self._snapshot, index)
                    if mark is not None:
                        marks[index] = mark
            return len(marks) == len(others)

        self._wait(look, lambda: f"the data files of {_hosts_text([i for i in others if i not in marks])}")
        return [marks[index] for index in others]

    def _await_commit(self) -> None:
        def look() -> bool:
            return COMMIT_NAME in self._names() and self._commit_that_counts() is not None

        self._wait(look, lambda: "COMMIT, which the coordinator's host writes")

    def _names(self) -> set[str]:
        """Return the files of the checkpoint. Raises: CheckpointError when another host has given it up."""
        names = {entry.name for entry in self._directory.entries()}
        for index in range(self._plan.num_hosts):
            if index != self._plan.host_index and failed_name(self._snapshot.round, index) in names:
                problem = read_failed(self._directory, self._snapshot, index)
                if problem is not None:
                    raise CheckpointError(f"{self._directory}: host {index} has given up: {problem}")
        return names

    def _wait(self, is_met: Callable[[], bool], awaited: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._plan.commit_timeout_s
        for pause_s in pauses_s():
            if is_met():
                return
            newer = WritingMark.read(self._directory)
            if newer is not None and newer.round > self._snapshot.round:
                raise CheckpointError(
                    f"{self._directory}: round {newer.round} makes this checkpoint; gave up {awaited()}, for which"
                    f" round {self._snapshot.round} waited"
                )
            if self._is_superseded():
                raise CheckpointError(f"{self._directory}: a newer round wants a checkpoint; gave up {awaited()}")
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{self._directory}: waited {self._plan.commit_timeout_s:g} s for {awaited()}; see the writer's log"
                    " there, or raise runtime.checkpoint_timeout_s"
                )
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))

    # Afterwards

    def _tidy(self) -> list[str]:
        """Expose the complete checkpoint to torch, whoever committed it, and remove what it needs no more.

        Returns what went wrong.
        """
        if not self._plan.is_coordinator:
            return []
        try:
            manifest = read_manifest(self._directory)
            expose_metadata(self._directory, manifest)
            kept = {*manifest.files, manifest_place(self._directory).name}
            for entry in self._directory.entries():
                # where COMMIT may yet become another round's, what that names stays
                is_old = is_leftover(entry.name, manifest.round) and (self._plan.is_exclusive or is_mark(entry.name))
                if is_old and entry.name not in kept:
                    entry.remove()
        except CheckpointError as error:
            return [str(error)]
        return []

    def _give_up(self, problem: str) -> list[str]:
        """Remove what this host wrote if no COMMIT can vouch for it, tell the others, and return what went wrong."""
        own = (done_name(self._snapshot.round, self._plan.host_index), *(self._file_name(s.rank) for s in self._slots))
        try:
            for entry in self._directory.entries() if self._is_removable else ():
                if entry.name in own or (self._plan.is_coordinator and is_small_file(entry.name, self._snapshot.round)):
                    entry.remove()
            if self._plan.num_hosts > 1 and not is_committed(self._directory):
                write_failed(self._directory, self._snapshot, self._plan.host_index, problem)
        except CheckpointError as error:
            return [str(error)]
        return []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _hosts_text(indexes: Sequence[int]) -> str:
    listed = ", ".join(map(str, indexes[:10])) + (" and more" if len(indexes) > 10 else "")
    return f"host{'s' if len(indexes) != 1 else ''} {listed}"
