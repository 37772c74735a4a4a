"""The trainer's interface to the checkpoints of a job: resume from one, take one, find out whether it was stored.

A checkpoint has two stages: a snapshot in the host's memory, for which the step waits, and its write to storage by a
separate process of the host (writer.py). job_restore.py decides where a job resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.arena.directory import remove_arena, wake_writer
from megatrain.arena.plans import HostPlan
from megatrain.checkpoint.arena_slots import ArenaSlot, SnapshotLabel, plan_snapshot
from megatrain.checkpoint.attach import Attachment
from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.host_writer import HostWriter
from megatrain.checkpoint.job_peers import JobPeers
from megatrain.checkpoint.job_restore import JobRestore, RestoreResult
from megatrain.checkpoint.ownership import SavedShard
from megatrain.checkpoint.round_claim import RoundClaim
from megatrain.checkpoint.save_policy import free_bytes, policy_notes
from megatrain.checkpoint.snapshots import Snapshots, SnapshotTimes
from megatrain.checkpoint.writer_plans import host_plan, publish_rank_plan
from megatrain.checkpoint_format.claims import JobRound
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.checkpoint_format.url_location import open_location
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.contracts.errors import MegatrainError, SaveError
from megatrain.contracts.records.rounds import Rollback


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
        self._local_rank = local_rank
        self._notes: list[str] = []
        # the writer process may have been started from another directory
        location = directory if "://" in directory else str(Path(directory).absolute())
        self._checkpoints = open_location(location)
        self._claim = RoundClaim(self._checkpoints, job_round, round_number, mesh)
        self._log = logs / "checkpoint-writer.log"
        self._plan = plan_snapshot(shards)
        self._snapshots: Snapshots | None = None
        self._writer: HostWriter | None = None
        self._peers = JobPeers(config, mesh, local_rank, store_address)
        self._restore = JobRestore(
            config,
            mesh,
            shards,
            data,
            self._plan,
            self._checkpoints,
            self._claim,
            self._peers,
            local_rank=local_rank,
            host=host,
            rollback=rollback,
            log=self._log,
        )

    def restore(self) -> RestoreResult | None:
        """Fill the state and return where to resume; None when there is nothing to resume from.

        Communication: that of `JobRestore.restore`, and agreements of all ranks.
        Raises: CheckpointError, ConfigError, TopologyError, CommunicationError, FencedError, the same on every rank.
        """
        try:
            restored = self._restore.restore()
            result = restored.result
            self._claim.begin(self._restore.branch, 0 if result is None else result.continuation.progress.step)
            self._publish(restored.slots)
            self._peers.start(self.attachment, has_old=restored.is_from_memory)
            self._offer_newest()
        except MegatrainError:
            self._restore.leave_if_empty()
            raise
        return result

    @property
    def attachment(self) -> Attachment:
        """The arena of this host, and the host of each rank; known after `restore`."""
        return self._restore.attachment

    @property
    def round(self) -> int:
        """The number of this round among all rounds that used the arena; known after `restore`."""
        return self._claim.number

    @property
    def stream(self) -> SampleStream:
        """The sample order from here on; known after `restore`."""
        return self._restore.stream

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

        Communication: two small agreements; more while a rank waits for storage.
        Raises: SaveError, on every rank, when it was not stored.
        """
        assert self._snapshots is not None
        assert self._writer is not None
        is_in_time = self._snapshots.wait(self._config.runtime.checkpoint_timeout_s)
        is_stored = is_in_time and not self._snapshots.has_failed(step)
        if not self._mesh.cpu_groups.all_agree(is_stored):
            raise SaveError(
                f"the checkpoint of step {step} did not reach {self._checkpoints / self._restore.branch}:"
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
        notes = [*self._claim.notes, *self._restore.notes, *self._notes]
        self._claim.notes, self._restore.notes, self._notes = [], [], []
        return [*notes, *(self._writer.new_messages() if self._writer is not None else []), *self._peers.new_messages()]

    def close(self, *, is_done: bool) -> None:
        """Leave the arena. After the job is done, the arena is removed."""
        self._peers.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if not self._restore.is_attached:
            return
        arena = self.attachment.arena
        if is_done and self._local_rank == 0:
            self._host_plan(keep_arena_s=0.0).write(arena.host_plan)
        self.attachment.lock.release()
        if not wake_writer(arena) and is_done:
            # no writer was ever needed: the last worker to leave removes the arena
            remove_arena(arena.root)

    @property
    def directory(self) -> str:
        """The directory of the current branch's checkpoints."""
        return str(self._checkpoints / self._restore.branch)

    def _publish(self, slots: Sequence[ArenaSlot]) -> None:
        """Publish the plans for the hosts' writers. They are the same for all snapshots of the round."""
        arena, mesh, rank = self.attachment.arena, self._mesh, self._mesh.rank
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
            self.attachment.next_snapshot,
            rank,
            self._local_rank,
            mesh.cpu_groups,
            self._writer.wake_or_start,
            self._peers.failure_number,
            mesh.recorder.show_liveness,
        )
        settings = self._config.checkpoint
        will_save = bool(settings.interval) or settings.is_by_time or settings.save_at_end
        if self._local_rank == 0 and (will_save or self._snapshots.pending() is not None):
            # start the writer before there is work: it also removes the arena if all workers are killed
            self._writer.wake_or_start()

    def _offer_newest(self) -> None:
        assert self._snapshots is not None
        newest = self._snapshots.newest()
        self._peers.offer(newest.path if newest is not None else None)

    def _host_plan(self, keep_arena_s: float) -> HostPlan:
        return host_plan(
            self._config,
            self._mesh,
            self.attachment,
            self._claim,
            str(self._checkpoints),
            self._restore.branch,
            self.stream,
            keep_arena_s=keep_arena_s,
        )
