"""The trainer's interface to the checkpoints of a job: resume from one, take one, find out whether it was stored.

A checkpoint has two stages: a snapshot in the host's memory, for which the step waits, and its write to storage by a
separate process of the host (writer.py). A job resumes from memory, if a snapshot is still there for every rank and
storage has no newer checkpoint; else from storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.arena.directory import arena_path, remove_arena, wake_writer
from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import sealed_by_rank
from megatrain.checkpoint.agreement import raised_by_all, result_of_rank_0
from megatrain.checkpoint.arena_slots import ArenaSlot, SnapshotLabel, missing_slot_bytes, open_slots, plan_snapshot
from megatrain.checkpoint.attach import Attachment, attach
from megatrain.checkpoint.continuation import Continuation, TrainingProgress, continuation, origin_of
from megatrain.checkpoint.host_writer import HostWriter
from megatrain.checkpoint.job_peers import JobPeers, storage_instead
from megatrain.checkpoint.load import load_state
from megatrain.checkpoint.memory_origin import memory_origin
from megatrain.checkpoint.ownership import SavedShard
from megatrain.checkpoint.round_claim import RoundClaim
from megatrain.checkpoint.save_policy import free_bytes, policy_notes
from megatrain.checkpoint.snapshots import Snapshots, SnapshotTimes
from megatrain.checkpoint.start import (
    StartingPoint,
    pending_rollback,
    read_storage,
    rollback_start,
    shared_manifest,
)
from megatrain.checkpoint.start_order import first_order, known_order, skipping
from megatrain.checkpoint.writer_plans import host_plan, publish_rank_plan
from megatrain.checkpoint_format.claims import JobRound
from megatrain.checkpoint_format.lineage import open_branch
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.checkpoint_format.url_location import open_location
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, MegatrainError, SaveError
from megatrain.contracts.records.rounds import Rollback
from megatrain.contracts.sample_ranges import samples_text


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a job resumes. `source` names the snapshot or checkpoint; `bytes_read`: by this rank, from storage."""

    continuation: Continuation
    source: str
    bytes_read: int
    notes: tuple[str, ...]


class JobCheckpoints:
    """Takes and restores the checkpoints of one job. All ranks call every method except `new_messages` together."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        shards: Sequence[SavedShard],
        data: SampleStream,
        *,
        local_rank: int,
        round_number: int,
        directory: str,
        logs: Path,
        store_address: str = "",
        host: str = "",
        rollback: Rollback | None = None,
        job_round: JobRound | None = None,
    ) -> None:
        """directory: the path or URL of the job's checkpoints. logs: the directory of the writer's log.

        store_address: host and port where the ranks meet, "" when all of them are on this machine. host: this host's
        name in the launcher, "" without a launcher. rollback: the rollback that the launcher requests; it may be done
        already. job_round: the launcher's round, None without a launcher.
        """
        self._config = config
        self._mesh = mesh
        self._shards = tuple(shards)
        self._data = data
        self._local_rank = local_rank
        self._host = host
        self._rollback = rollback
        self._notes: list[str] = []
        # the writer process may have been started from another directory
        location = directory if "://" in directory else str(Path(directory).absolute())
        self._checkpoints: Location = open_location(location)
        self._claim = RoundClaim(self._checkpoints, job_round, round_number, mesh)
        self._log = logs / "checkpoint-writer.log"
        self._plan = plan_snapshot(shards)
        self._branch = ""
        self._attachment: Attachment | None = None
        self._snapshots: Snapshots | None = None
        self._writer: HostWriter | None = None
        self._peers = JobPeers(config, mesh, local_rank, store_address)

    def restore(self) -> Restored | None:
        """Fill the state and return where to resume; None when there is nothing to resume from.

        Communication: agreements of all ranks, and that of `load_state`.
        Raises: CheckpointError, ConfigError, TopologyError, CommunicationError, the same on every rank.
        """
        try:
            return self._restore()
        except MegatrainError:
            self._leave_if_empty()
            raise

    def _restore(self) -> Restored | None:
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
                has_memory, start = False, storage_instead(start, memory.snapshot.step, problem)
        if has_memory:
            restored: Restored | None = self._from_memory(slots, start)
        else:
            for slot in slots:
                slot.close()
            restored = self._from_storage(start, rollback)
            slots = self._open_slots()
            for slot in slots:
                slot.clear()
        self._claim.begin(self._branch, 0 if restored is None else restored.continuation.progress.step)
        self._publish(slots)
        self._copy_to_peers(has_old=has_memory)
        return restored

    @property
    def attachment(self) -> Attachment:
        """The arena of this host, and the host of each rank; known after `restore`."""
        assert self._attachment is not None
        return self._attachment

    @property
    def round(self) -> int:
        """The number of this round among all rounds that used the arena; known after `restore`."""
        return self._claim.number

    @property
    def stream(self) -> SampleStream:
        """The sample order from here on; known after `restore`."""
        return self._data

    def take(self, progress: TrainingProgress) -> SnapshotTimes:
        """Take a snapshot of the state. The writer stores it in the background.

        Communication: one small agreement, sometimes two (see Snapshots.take); more while a rank waits for storage.
        Raises: SaveError when storage is so slow that no slot is free in time.
        """
        assert self._snapshots is not None
        label = SnapshotLabel(
            step=progress.step,
            round=self._claim.number,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            num_updates=progress.num_updates,
            num_skipped=progress.num_skipped,
        )
        times = self._snapshots.take(label, self._config.runtime.checkpoint_timeout_s)
        self._peers.set_smallest_failure_number(self._snapshots.smallest_failure_number)
        self._offer_newest()
        return times

    def wait(self, step: int) -> None:
        """Wait until the snapshot of `step` is a committed checkpoint.

        Communication: one small agreement, sometimes two (see Snapshots.take); more while a rank waits for storage.
        Raises: SaveError, on every rank, when it was not stored.
        """
        assert self._snapshots is not None
        assert self._writer is not None
        came = self._snapshots.wait(self._config.runtime.checkpoint_timeout_s)
        is_stored = came and not self._snapshots.has_failed(step)
        if not self._mesh.cpu_groups.all_agree(is_stored):
            raise SaveError(
                f"the checkpoint of step {step} did not reach {self._checkpoints / self._branch}:"
                f" {self._writer.last_error()}"
            )

    def ensure_writer_runs(self) -> None:
        """Restart this host's writer if it was killed while a snapshot is not stored. Called regularly."""
        if self._snapshots is None or self._writer is None:
            return
        self._snapshots.ensure_writer_runs()
        if self._snapshots.take_stored_event():
            self._mesh.recorder.record_write_time(self._writer.last_write_s())

    @property
    def is_storing(self) -> bool:
        """Return whether storage does not have the last snapshot yet."""
        return self._snapshots is not None and self._snapshots.pending() is not None

    def new_messages(self) -> list[str]:
        """Return messages about the host's writer and the peers since the last call. Does not communicate."""
        notes = [*self._claim.notes, *self._notes]
        self._claim.notes, self._notes = [], []
        return [*notes, *(self._writer.new_messages() if self._writer is not None else []), *self._peers.new_messages()]

    def close(self, *, is_done: bool) -> None:
        """Leave the arena. After the job is done, the arena is removed."""
        self._peers.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._attachment is None:
            return
        if is_done and self._local_rank == 0:
            self._host_plan(keep_arena_s=0.0).write(self._attachment.arena.host_plan)
        arena = self._attachment.arena
        self._attachment.lock.release()
        if not wake_writer(arena) and is_done:
            # no writer was ever needed: the last worker to leave removes the arena
            remove_arena(arena.root)

    def _leave_if_empty(self) -> None:
        """Leave the arena. If no round could resume from its content, the last rank of the host removes it."""
        if self._attachment is None:
            return
        arena = self._attachment.arena
        self._attachment.lock.release()
        with suppress(CheckpointError):  # the error that led here matters more
            if not sealed_by_rank(arena) and not sealed_by_rank(arena, is_copy=True):
                remove_arena(arena.root)

    @property
    def directory(self) -> str:
        """The directory of the current branch's checkpoints."""
        return str(self._checkpoints / self._branch)

    def _attach(
        self, branch: str, created_unix_s: float, stored_step: int = -1, store_until_step: int | None = None
    ) -> Attachment:
        self._branch = branch
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
            may_fetch=self._peers.are_wanted,
            log=self._log,
            # meanwhile the other ranks wait for this host in a collective, and a watchdog waits for all ranks
            wait_storage_s=self._config.runtime.checkpoint_timeout_s / 2,
            stored_step=stored_step,
            store_until_step=store_until_step,
        )
        self._peers.choose(self._attachment.hosts)
        return self._attachment

    def _from_storage(self, start: StartingPoint, rollback: Rollback | None) -> Restored | None:
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
                        data=known_order(start, origin.data, self._data, self._config, rollback, origin.progress),
                    )
                found = continuation(origin, self._config, self._data, is_same_run=candidate.is_own)
                try:
                    shards = [(shard.kind, shard.shard) for shard in self._shards]
                    location = open_location(candidate.location)
                    report = load_state(location, manifest, shards, self._mesh.rank, self._mesh.cpu_groups)
                except CheckpointError as error:
                    problem = error
                else:
                    if candidate.is_own:
                        self._data = found.stream
                    else:
                        begun = start.begun_at(found.progress.consumed_samples)
                        notes += self._begin_order(begun, found.stream, rollback, found.progress)
                    notes += start.skip_notes(number, problems)
                    if number > 0 or rollback is not None:
                        parent = (candidate.branch, candidate.step) if candidate.is_own else (start.branch, 0)
                        notes.append(self._open_branch(start, *parent, rollback))
                    return Restored(found, candidate.location, report.bytes_read, tuple(notes))
            problems[number] = str(problem)
            if len(problems) == len(start.candidates):
                raise problem
        order_notes = self._begin_order(start, self._data, rollback, TrainingProgress())
        if rollback is not None:
            order_notes = [*notes, *order_notes, self._open_branch(start, start.branch, 0, rollback)]
        self._notes += order_notes
        return None

    def _begin_order(
        self, start: StartingPoint, begun: SampleStream, rollback: Rollback | None, progress: TrainingProgress
    ) -> Sequence[str]:
        """Set the sample order of a job that resumes from no checkpoint of its run; return messages for the log."""
        order = first_order(start, begun, self._data, self._config, rollback, progress)
        if order.problem:
            raise CheckpointError(
                f"{self._checkpoints}: its sample order differs: {order.problem}; restore the data and "
                "data.seed, or begin another run (job.run_directory)"
            )
        self._data = order.stream
        return order.notes

    def _open_branch(self, start: StartingPoint, parent: str, step: int, rollback: Rollback | None) -> str:
        """Begin a branch at an older step; everything after that step is abandoned. Returns a message for the log."""
        reason, rollback_id = f"newer checkpoints of {self._branch} are damaged", "".join(start.rollbacks[:1])
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
                data=self._data if self._data.skipped else None,
                round_number=self._claim.number,
            )
            return [found.name, found.created_unix_s]

        branch, created_unix_s = result_of_rank_0(self._mesh.cpu_groups, self._mesh.rank, opened)
        assert self._attachment is not None
        self._attachment.lock.release()
        if self._local_rank == 0:
            remove_arena(self._attachment.arena.root)
        self._attach(branch, created_unix_s)
        without = f", without samples {samples_text(self._data.skipped)}" if self._data.skipped else ""
        return f"went back to step {step}, so the run continues as branch {branch}{without} ({reason})"

    def _open_slots(self) -> list[ArenaSlot]:
        assert self._attachment is not None
        mesh, num_slots = self._mesh, self._config.checkpoint.slots
        with raised_by_all(mesh.cpu_groups, mesh.rank):
            own_bytes = missing_slot_bytes(self._attachment.arena, mesh.rank, num_slots, self._plan)
        self._peers.free_memory(self._attachment, own_bytes)
        is_pinned = mesh.device.type == "cuda"
        with raised_by_all(mesh.cpu_groups, mesh.rank):
            return open_slots(self._attachment.arena, mesh.rank, num_slots, self._plan, is_pinned=is_pinned)

    def _from_memory(self, slots: Sequence[ArenaSlot], start: StartingPoint) -> Restored:
        """Resume from the snapshot that is in a slot of every rank."""
        attachment = self._attachment
        assert attachment is not None
        assert attachment.memory is not None
        slot = next(slot for slot in slots if slot.words().sealed == attachment.memory.snapshot)
        words = slot.words()
        origin = memory_origin(attachment, words, self._mesh.rank, self._mesh.cpu_groups)
        origin = replace(origin, data=skipping(start, origin.data, self._config, None, origin.progress))
        found = continuation(origin, self._config, self._data, is_same_run=True)
        self._data = found.stream
        slot.copy_in()
        if attachment.missing:
            # the lost hosts' writers, which would have stored the snapshot in its old round, are gone
            paths, is_pending = [slot.path for slot in slots], words.step > start.newest_step
            number = self._peers.adopt(attachment, paths, self._claim.number, is_pending=is_pending)
            self._attachment = replace(attachment, next_snapshot=number + 1)
        return Restored(found, origin.location, 0, start.warnings)

    def _publish(self, slots: Sequence[ArenaSlot]) -> None:
        """Publish the plans for the hosts' writers. They are the same for all snapshots of the round."""
        assert self._attachment is not None
        arena, mesh, rank = self._attachment.arena, self._mesh, self._mesh.rank
        num_bytes = publish_rank_plan(
            arena, self._plan, mesh, self._claim.number, tokenizer=self._config.data.tokenizer
        )
        if num_bytes is not None:
            location = str(self._checkpoints)
            self._notes += policy_notes(self._config.checkpoint, location, num_bytes, free_bytes(location))
        if self._local_rank == 0:
            self._host_plan(self._config.checkpoint.keep_arena_s).write(arena.host_plan)
        mesh.cpu_groups.all_agree(True)
        self._writer = HostWriter(arena, self._log)
        self._snapshots = Snapshots(
            slots,
            self._plan.num_bytes,
            self._attachment.next_snapshot,
            rank,
            self._local_rank,
            mesh.cpu_groups,
            self._writer.call,
            self._peers.failure_number,
            mesh.recorder.show_liveness,
        )
        settings = self._config.checkpoint
        will_save = bool(settings.interval) or settings.is_by_time or settings.save_at_end
        if self._local_rank == 0 and (will_save or self._snapshots.pending() is not None):
            # start the writer before there is work: it also removes the arena if all workers are killed
            self._writer.call()

    def _copy_to_peers(self, *, has_old: bool) -> None:
        """Begin to copy snapshots to peers, starting with the newest one that this rank has."""
        assert self._attachment is not None
        self._peers.start(self._attachment, has_old=has_old)
        self._offer_newest()

    def _offer_newest(self) -> None:
        assert self._snapshots is not None
        newest = self._snapshots.newest()
        self._peers.offer(newest.path if newest is not None else None)

    def _host_plan(self, keep_arena_s: float) -> HostPlan:
        assert self._attachment is not None
        return host_plan(
            self._config,
            self._mesh,
            self._attachment,
            self._claim,
            str(self._checkpoints),
            self._branch,
            self._data,
            keep_arena_s=keep_arena_s,
        )
