"""Restores the state of a job at the start of a round: from the memory of the hosts, else from storage.

A job resumes from memory if a snapshot is still there for every rank and storage has no newer checkpoint. After a
rollback, or if the newest checkpoint is damaged, the run continues as another branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.arena.directory import arena_path, remove_arena
from megatrain.arena.sealed import sealed_by_rank
from megatrain.checkpoint.agreement import raised_by_all, result_of_rank_0
from megatrain.checkpoint.arena_slots import ArenaSlot, SnapshotPlan, missing_slot_bytes, open_slots
from megatrain.checkpoint.attach import Attachment, attach
from megatrain.checkpoint.continuation import Continuation, TrainingProgress, continuation, origin_of
from megatrain.checkpoint.job_peers import JobPeers, fallback_start
from megatrain.checkpoint.load import load_state
from megatrain.checkpoint.memory_origin import memory_origin
from megatrain.checkpoint.ownership import SavedShard
from megatrain.checkpoint.round_claim import RoundClaim
from megatrain.checkpoint.start import (
    StartingPoint,
    pending_rollback,
    read_storage,
    rollback_start,
    shared_manifest,
)
from megatrain.checkpoint.start_order import first_order, known_order, skipping
from megatrain.checkpoint_format.lineage import open_branch
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.checkpoint_format.url_location import open_location
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.records.rounds import Rollback
from megatrain.contracts.sample_ranges import samples_text


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Where a job resumes. `source` names the snapshot or checkpoint; `bytes_read`: by this rank, from storage."""

    continuation: Continuation
    source: str
    bytes_read: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RestoredState:
    """The state after a restore. result: None if the job starts from the beginning. slots: of this rank, open."""

    result: RestoreResult | None
    slots: Sequence[ArenaSlot]
    is_from_memory: bool


class JobRestore:
    """Fills the state of one job. All ranks call every method together, except `leave_if_empty`."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        shards: Sequence[SavedShard],
        data: SampleStream,
        plan: SnapshotPlan,
        checkpoints: Location,
        claim: RoundClaim,
        peers: JobPeers,
        *,
        local_rank: int,
        host: str,
        rollback: Rollback | None,
        log: Path,
    ) -> None:
        """data: the sample order of this start's configuration. plan: of `shards`. log: the writer's.

        host: this host's name in the launcher, "" without a launcher. rollback: the one that the launcher requests.
        """
        self._config = config
        self._mesh = mesh
        self._shards = tuple(shards)
        self._plan = plan
        self._checkpoints = checkpoints
        self._claim = claim
        self._peers = peers
        self._local_rank = local_rank
        self._host = host
        self._rollback = rollback
        self._log = log
        self._attachment: Attachment | None = None
        self.branch = ""
        self.stream = data
        """The sample order from here on; known after `restore`."""
        self.notes: list[str] = []
        """Messages for the log of a job that resumes from nothing."""

    @property
    def is_attached(self) -> bool:
        """Whether this rank uses the arena of its host."""
        return self._attachment is not None

    @property
    def attachment(self) -> Attachment:
        """The arena of this host, and the host of each rank; known after `restore`."""
        assert self._attachment is not None
        return self._attachment

    def restore(self) -> RestoredState:
        """Fill the state, and open this rank's slots.

        Communication: agreements of all ranks, and that of `load_state`.
        Raises: CheckpointError, ConfigError, TopologyError, CommunicationError, FencedError, the same on every rank.
        """
        cpu_groups, settings = self._mesh.cpu_groups, self._config.checkpoint
        # claim before storage is read: an older round's commits until now count, and it begins no removal after this
        self._claim.take()
        start = read_storage(self._checkpoints, settings, self._mesh.rank, cpu_groups)
        rollback = pending_rollback(self._rollback, start)
        store_until_step = None if rollback is None else rollback.to_step
        attachment = self._attach(start.branch, start.branch_created_unix_s, start.newest_step, store_until_step)
        memory = attachment.memory
        if memory is None or attachment.may_have_stored:
            # a snapshot of an earlier layout or of a lost host may have reached storage meanwhile
            start = read_storage(self._checkpoints, settings, self._mesh.rank, cpu_groups)
        least = max(attachment.last_round + 1, start.last_round + 1)
        if least > self._claim.number:
            # an earlier round had this number or a higher one, although its claim is missing here
            self._claim.take(least)
        if rollback is not None:
            start = rollback_start(start, rollback, settings)
        has_memory = memory is not None and settings.resume and memory.snapshot.step >= start.newest_step
        slots = self._open_slots() if has_memory else []
        if memory is not None and has_memory:
            problem = self._peers.fetch(attachment, [slot.path for slot in slots])
            if problem is not None:
                has_memory, start = False, fallback_start(start, memory.snapshot.step, problem)
        if has_memory:
            return RestoredState(self._from_memory(slots, start), slots, is_from_memory=True)
        for slot in slots:
            slot.close()
        result = self._from_storage(start, rollback)
        slots = self._open_slots()
        for slot in slots:
            slot.clear()
        return RestoredState(result, slots, is_from_memory=False)

    def leave_if_empty(self) -> None:
        """Leave the arena. If no round could resume from its content, the last rank of the host removes it."""
        if self._attachment is None:
            return
        arena = self._attachment.arena
        self._attachment.lock.release()
        with suppress(CheckpointError):  # the error that led here matters more
            if not sealed_by_rank(arena) and not sealed_by_rank(arena, is_copy=True):
                remove_arena(arena.root)

    def _attach(
        self, branch: str, created_unix_s: float, stored_step: int = -1, store_until_step: int | None = None
    ) -> Attachment:
        self.branch = branch
        # with the creation time: snapshots in memory of a run that was removed must not count for this one
        location = f"{self._checkpoints}@{created_unix_s!r}"
        directory = Path(self._config.checkpoint.arena_directory)
        path = arena_path(directory, self._config.job.name, branch, location, self._host)
        self._attachment = attach(
            path,
            self._plan,
            self._mesh.rank,
            self._local_rank,
            self._mesh.cpu_groups,
            num_slots=self._config.checkpoint.slots,
            may_fetch=self._peers.are_enabled,
            log=self._log,
            # meanwhile the other ranks wait for this host in a collective, and a watchdog waits for all ranks
            wait_storage_s=self._config.runtime.checkpoint_timeout_s / 2,
            stored_step=stored_step,
            store_until_step=store_until_step,
        )
        self._peers.choose(self._attachment.hosts)
        return self._attachment

    def _from_storage(self, start: StartingPoint, rollback: Rollback | None) -> RestoreResult | None:
        """Try the candidates until one loads. After a rollback or a damaged candidate, begin a branch there."""
        notes = [*start.warnings, *start.notes]
        problems: dict[int, str] = {}
        for number, candidate in start.in_turn():
            try:
                manifest = shared_manifest(candidate, self._config.job.name, self._mesh.rank, self._mesh.cpu_groups)
            except CheckpointError as error:
                problem = error
            else:
                origin = origin_of(manifest, candidate.location)
                if candidate.is_own:
                    origin = replace(
                        origin,
                        data=known_order(start, origin.data, self.stream, self._config, rollback, origin.progress),
                    )
                found = continuation(origin, self._config, self.stream, is_same_run=candidate.is_own)
                try:
                    shards = [(shard.kind, shard.shard) for shard in self._shards]
                    location = open_location(candidate.location)
                    report = load_state(location, manifest, shards, self._mesh.rank, self._mesh.cpu_groups)
                except CheckpointError as error:
                    problem = error
                else:
                    if candidate.is_own:
                        self.stream = found.stream
                    else:
                        begun = start.begun_at(found.progress.consumed_samples)
                        notes += self._begin_order(begun, found.stream, rollback, found.progress)
                    notes += start.skip_notes(number, problems)
                    if number > 0 or rollback is not None:
                        parent = (candidate.branch, candidate.step) if candidate.is_own else (start.branch, 0)
                        notes.append(self._open_branch(start, *parent, rollback))
                    return RestoreResult(found, candidate.location, report.bytes_read, tuple(notes))
            problems[number] = str(problem)
            if len(problems) == len(start.candidates):
                raise problem
        order_notes = self._begin_order(start, self.stream, rollback, TrainingProgress())
        if rollback is not None:
            order_notes = [*notes, *order_notes, self._open_branch(start, start.branch, 0, rollback)]
        self.notes += order_notes
        return None

    def _begin_order(
        self, start: StartingPoint, begun: SampleStream, rollback: Rollback | None, progress: TrainingProgress
    ) -> Sequence[str]:
        """Set the sample order of a job that resumes from no checkpoint of its run; return messages for the log."""
        order = first_order(start, begun, self.stream, self._config, rollback, progress)
        if order.problem:
            raise CheckpointError(
                f"{self._checkpoints}: its sample order differs: {order.problem}; restore the data and "
                "data.seed, or begin another run (job.run_directory)"
            )
        self.stream = order.stream
        return order.notes

    def _open_branch(self, start: StartingPoint, parent: str, step: int, rollback: Rollback | None) -> str:
        """Begin a branch at an older step; everything after that step is abandoned. Returns a message for the log."""
        reason, rollback_id = f"newer checkpoints of {self.branch} are damaged", "".join(start.rollbacks[:1])
        if rollback is not None:
            reason = f"incident {rollback.rollback_id}: training went wrong after step {rollback.to_step}"
            rollback_id = rollback.rollback_id

        def opened() -> list[Any]:
            found = open_branch(
                self._checkpoints,
                parent,
                step,
                reason,
                rollback=rollback_id,
                data=self.stream if self.stream.skipped else None,
                round_number=self._claim.number,
            )
            return [found.name, found.created_unix_s]

        branch, created_unix_s = result_of_rank_0(self._mesh.cpu_groups, self._mesh.rank, opened)
        self.attachment.lock.release()
        if self._local_rank == 0:
            remove_arena(self.attachment.arena.root)
        self._attach(branch, created_unix_s)
        without = f", without samples {samples_text(self.stream.skipped)}" if self.stream.skipped else ""
        return f"went back to step {step}, so the run continues as branch {branch}{without} ({reason})"

    def _open_slots(self) -> list[ArenaSlot]:
        mesh, num_slots = self._mesh, self._config.checkpoint.slots
        with raised_by_all(mesh.cpu_groups, mesh.rank):
            own_bytes = missing_slot_bytes(self.attachment.arena, mesh.rank, num_slots, self._plan)
        self._peers.free_memory(self.attachment, own_bytes)
        is_pinned = mesh.device.type == "cuda"
        with raised_by_all(mesh.cpu_groups, mesh.rank):
            return open_slots(self.attachment.arena, mesh.rank, num_slots, self._plan, is_pinned=is_pinned)

    def _from_memory(self, slots: Sequence[ArenaSlot], start: StartingPoint) -> RestoreResult:
        """Resume from the snapshot that is in a slot of every rank."""
        attachment = self.attachment
        assert attachment.memory is not None
        slot = next(slot for slot in slots if slot.words().sealed == attachment.memory.snapshot)
        words = slot.words()
        origin = memory_origin(attachment, words, self._mesh.rank, self._mesh.cpu_groups)
        origin = replace(origin, data=skipping(start, origin.data, self._config, None, origin.progress))
        found = continuation(origin, self._config, self.stream, is_same_run=True)
        self.stream = found.stream
        slot.copy_in()
        if attachment.missing:
            # the lost hosts' writers, which would have stored the snapshot in its old round, are gone
            paths, is_pending = [slot.path for slot in slots], words.step > start.newest_step
            number = self._peers.adopt(attachment, paths, self._claim.number, is_pending=is_pending)
            self._attachment = replace(attachment, next_snapshot=number + 1)
        return RestoreResult(found, origin.location, 0, start.warnings)
