"""The thread that follows the workers: it reads their black boxes ten times a second.

Each poll updates the status, checks whether the ranks make progress, stops the workers if the job may have continued
without this host, writes the control pages, and carries out the driver's commands. A stall counts only if two
consecutive polls find it: after the whole machine was suspended, a poll may run before the ranks do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from megatrain.contracts.black_box.values import Phase, Progress
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_records import GpuErrorRecord, HangEvidence, Stall
from megatrain.contracts.records.rounds import HostCommand
from megatrain.fencing.fence import Deadlines, FenceAction, FenceRule, LeaseView, StepSilence, fence, step_silence
from megatrain.fencing.phase_timeouts import PhaseTimeouts, find_stall
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.jobs.host_view import stall_text
from megatrain_launcher.executor.control_pages import ControlPages
from megatrain_launcher.executor.crash_evidence import BoxPaths
from megatrain_launcher.executor.evidence import hang_evidence, is_running
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder, Running
from megatrain_launcher.executor.membership import Membership
from megatrain_launcher.executor.order_state import OrderState
from megatrain_launcher.executor.progress import RankProgress, RoundProgress, host_progress
from megatrain_launcher.liveness import orders_lost_after_s

_logger = logging.getLogger(__name__)
_POLL_S = 0.1
_NS = 1_000_000_000


class CommandKind(StrEnum):
    """The commands of the driver to executors. Unknown kinds, of another version, are ignored."""

    CHECKPOINT = "checkpoint"
    EVIDENCE = "evidence"
    CHECK = "check"
    PAIRS = "pairs"


class CommandTracker:
    """Tracks which commands are completed. Commands up to `seen` are older than this executor and are ignored."""

    def __init__(self, seen: int) -> None:
        self._seen = seen
        self._open: dict[int, HostCommand] = {}

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def completed(self) -> int:
        """The number up to which every command to this host is completed: `completed_command` of its status."""
        return min(self._open) - 1 if self._open else self._seen

    def take(self, commands: Iterable[HostCommand]) -> list[HostCommand]:
        """Add commands and return the new ones, in order."""
        fresh = [
            command for command in sorted(commands, key=lambda command: command.number) if command.number > self._seen
        ]
        for command in fresh:
            self._seen = command.number
            if command.kind in tuple(CommandKind):
                self._open[command.number] = command
        return fresh

    def mark_done(self, number: int) -> None:
        """Record that a command is completed, or can no longer be carried out."""
        self._open.pop(number, None)

    def mark_checkpoints_done(self, up_to: int) -> None:
        """Record that all ranks have completed the commands to save up to this number."""
        for number in [number for number, command in self._open.items() if command.kind == CommandKind.CHECKPOINT]:
            if number <= up_to:
                self.mark_done(number)


@dataclass(frozen=True, slots=True)
class FollowerParts:
    """The inputs and outputs of the follower. `box_paths`: the black boxes that it reads."""

    host: str
    state: HostStatusBuilder
    orders: OrderState
    membership: Membership
    box_paths: BoxPaths
    phase_timeouts: PhaseTimeouts
    fence_rule: FenceRule
    recording: DiagSettings
    """The settings for the ranks' recording until etcd has other ones."""
    publish: Callable[[HangEvidence], None]
    """Publishes evidence for the driver."""
    gpu_errors: Callable[[], tuple[GpuErrorRecord, ...]]
    """Reads the recent errors of the host's GPUs. Must not block."""
    check: Callable[[HostCommand, Callable[[], None]], None]
    """Starts health checks for a command; calls the function when their report is queued. Must not block."""


class _Followed:
    """The round that is currently followed."""

    def __init__(self, running: Running, box_paths: BoxPaths) -> None:
        part = running.assignment.part
        self.running = running
        self.number = running.assignment.round.number
        self.num_ranks = part.num_workers
        paths = box_paths.paths(self.number, part.ranks)
        pids = {part.first_rank + local_rank: pid for local_rank, pid in running.pids.items()}
        self.progress = RoundProgress(paths, pids, running.started_unix_s)
        self.pages = ControlPages(self.number)
        self.suspected: Stall | None = None
        """The stall that the last poll found."""
        self.stall: Stall | None = None
        """The stall that was published; it is published again if other ranks stall."""
        self.fence_action = FenceAction.GO_ON
        """The action at the last poll."""
        self.fence_actions_taken: set[FenceAction] = set()


def unfinished(ranks: Mapping[int, RankProgress], progress: RoundProgress) -> dict[int, Progress]:
    """Return the progress of the ranks that must still make progress or exit.

    A rank with a closed black box whose process still runs is included in phase STOPPING: its exit may hang.
    """
    found: dict[int, Progress] = {}
    for rank, progress_of_rank in ranks.items():
        if not progress_of_rank.is_closed:
            found[rank] = progress_of_rank.progress
        elif is_running(progress.watches[rank].pid):
            found[rank] = replace(progress_of_rank.progress, phase=Phase.STOPPING)
    return found


class RoundFollower:
    """Follows the running round, until `close`."""

    def __init__(self, parts: FollowerParts, seen_command: int) -> None:
        self._parts = parts
        self._followed: _Followed | None = None
        self._tracker = CommandTracker(seen_command)
        self._tracker_lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = RestartingThread("round follower", self._run, self._closed)

    def wake(self) -> None:
        """Poll now."""
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._change_round()
            if self._followed is not None:
                self._poll(self._followed)
            self._carry_out_new_commands()
            self._wake.wait(_POLL_S)
            self._wake.clear()
        self._stop_following()

    def _change_round(self) -> None:
        running = self._parts.state.running()
        number = 0 if running is None else running.assignment.round.number
        if self._followed is not None and self._followed.number != number:
            self._stop_following()
        if running is not None and self._followed is None:
            self._followed = _Followed(running, self._parts.box_paths)
            self._log_deadlines(number)

    def _log_deadlines(self, number: int) -> None:
        limits = self._limits(number)
        text = (
            "round %d: if this host loses its lease, its workers continue for %g s after each completed step, and save "
            "and stop after %g s without a lease (recovery.join_timeout_s=%g)"
        )
        _logger.info(text, number, limits.silent_s, limits.save_s, self._parts.fence_rule.join_timeout_s)

    def _stop_following(self) -> None:
        """Stop following a round that is over; its commands to save count as completed."""
        if self._followed is not None:
            self._followed.progress.close()
            self._followed = None
            self._mark_checkpoints_done(self._tracker.seen)

    def _poll(self, followed: _Followed) -> None:
        ranks = followed.progress.poll()
        found = host_progress(ranks, followed.num_ranks, followed.running.started_unix_s)
        self._parts.state.set_progress(followed.number, found)
        self._mark_checkpoints_done(found.completed_command)
        living = unfinished(ranks, followed.progress)
        self._check_for_stall(followed, living)
        if living:
            self._check_lease(followed, step_silence(living, time.monotonic_ns()))
        self._write_pages(followed)

    def _check_for_stall(self, followed: _Followed, living: Mapping[int, Progress]) -> None:
        stall = find_stall(living, self._parts.phase_timeouts, time.monotonic_ns(), time.time())
        is_sure = stall is None or followed.suspected is not None
        followed.suspected = stall
        if not is_sure:
            return
        before = followed.stall
        if (before and before.ranks) == (stall and stall.ranks):
            return
        if stall is not None:
            _logger.warning("round %d makes no progress: %s", followed.number, stall_text(stall))
            self._publish(followed)  # before the stall, so that the driver need not wait for the evidence
        self._parts.state.set_stall(followed.number, stall)
        followed.stall = stall

    def _check_lease(self, followed: _Followed, silence: StepSilence) -> None:
        """Stop the workers if the job may have continued without this host; two consecutive checks must agree."""
        limits = self._limits(followed.number)
        action, reason = fence(limits, self._lease(), silence)
        is_sure, followed.fence_action = action is followed.fence_action, action
        if not is_sure or action is FenceAction.GO_ON or action in followed.fence_actions_taken:
            return
        followed.fence_actions_taken.add(action)
        _logger.error("round %d: %s", followed.number, reason)
        self._parts.state.set_fenced(followed.number, reason)
        self._parts.orders.stop_round(followed.number, reason, is_saving=action is FenceAction.SAVE)

    def _limits(self, number: int) -> Deadlines:
        published = self._parts.orders.published_deadlines(number)
        return self._parts.fence_rule.deadlines(published.interval_s, published.stop_s)

    def _lease(self) -> LeaseView:
        """Return the lease for fencing. A host that receives no orders counts as a host without a lease."""
        without_orders_s = self._parts.orders.unconfirmed_s - orders_lost_after_s(self._parts.fence_rule.lease_ttl_s)
        gone_s = self._parts.membership.lease().gone_s  # negative while the lease is valid
        return LeaseView(max(gone_s, without_orders_s), has_lost_orders=without_orders_s > max(gone_s, 0.0))

    def _publish(self, followed: _Followed) -> None:
        session = self._parts.membership.session
        watches = followed.progress.watches
        errors = self._parts.gpu_errors()
        found = hang_evidence(self._parts.host, session, followed.number, watches, time.time(), errors)
        # check after reading the ranks; otherwise a rank that the halt killed could appear to be the culprit
        if not self._parts.orders.is_halted(followed.number):
            self._parts.publish(found)

    def _write_pages(self, followed: _Followed) -> None:
        # `gone_s` is negative while the lease is valid, so this time is then in the future
        valid_until_ns = time.monotonic_ns() - int(self._lease().gone_s * _NS)
        watches = followed.progress.watches
        paths = {rank: watch.path for rank, watch in watches.items() if watch.reader() is not None}
        followed.pages.set_deadlines(self._parts.orders.published_deadlines(followed.number))
        followed.pages.set_recording(self._parts.orders.diag_settings() or self._parts.recording)
        followed.pages.write(paths, max(1, valid_until_ns), time.time())

    def _carry_out_new_commands(self) -> None:
        with self._tracker_lock:
            fresh = self._tracker.take(self._parts.orders.commands_after(self._tracker.seen))
        for command in fresh:
            match command.kind:
                case CommandKind.CHECKPOINT if self._followed is not None:
                    self._followed.pages.command_checkpoint(command.number)
                    self._write_pages(self._followed)
                case CommandKind.CHECK | CommandKind.PAIRS:
                    self._parts.check(command, lambda number=command.number: self._mark_done(number))  # type: ignore[misc]
                case CommandKind.EVIDENCE if self._followed is not None:
                    self._publish(self._followed)
                    self._mark_done(command.number)
                case _:
                    self._mark_done(command.number)
        if fresh:
            self._report_completed()

    def _mark_done(self, number: int) -> None:
        """Record that a command is completed, and report the number up to which all commands are."""
        with self._tracker_lock:
            self._tracker.mark_done(number)
        self._report_completed()

    def _mark_checkpoints_done(self, up_to: int) -> None:
        with self._tracker_lock:
            self._tracker.mark_checkpoints_done(up_to)
        self._report_completed()

    def _report_completed(self) -> None:
        with self._tracker_lock:
            completed = self._tracker.completed
        self._parts.state.set_completed_command(completed)
