"""The thread that follows the workers: ten looks a second at their black boxes, and what must be done at once then.

Each look brings the status up to date, judges whether the ranks still move, fences the host when it must, writes the
control pages and obeys commands to save or to give evidence. A stall counts when two looks in a row agree: the first
may have come before the ranks, after the whole machine was held up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatrain.contracts.black_box_values import Phase, Progress
from megatrain.contracts.diag_records import DiagSettings
from megatrain.contracts.host_records import HangEvidence, Stall
from megatrain.contracts.rounds import HostCommand
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.failures.fence import Deadlines, FenceRule, FenceStep, LeaseView, StepSilence, fence, step_silence
from megatrain.failures.patience import Patience, find_stall
from megatrain.jobs.host_view import stall_text
from megatrain_launcher.executor.commands import CommandDesk, CommandKind
from megatrain_launcher.executor.control_pages import ControlPages
from megatrain_launcher.executor.crash_evidence import BoxPlaces
from megatrain_launcher.executor.evidence import hang_evidence, is_running
from megatrain_launcher.executor.hearing import deaf_after_s
from megatrain_launcher.executor.host_state import HostState, Running
from megatrain_launcher.executor.membership import Membership
from megatrain_launcher.executor.orders import OrderBook
from megatrain_launcher.executor.progress import RankProgress, RoundProgress, host_progress

_logger = logging.getLogger(__name__)
_LOOK_S = 0.1
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FollowerParts:
    """What the follower reads, and where it reports."""

    host: str
    state: HostState
    orders: OrderBook
    membership: Membership
    places: BoxPlaces
    patience: Patience
    fence_rule: FenceRule
    recording: DiagSettings
    """What the ranks record until somebody says otherwise."""
    publish: Callable[[HangEvidence], None]
    """Makes evidence known to the driver."""
    check: Callable[[HostCommand, Callable[[], None]], None]
    """Runs health checks for a command; calls back when their report is written. Must not block."""


class _Followed:
    """The round that is followed at the moment."""

    def __init__(self, running: Running, places: BoxPlaces) -> None:
        part = running.assignment.part
        self.running = running
        self.number = running.assignment.round.number
        self.num_ranks = part.num_workers
        paths = places.paths(self.number, range(part.first_rank, part.first_rank + part.num_workers))
        pids = {part.first_rank + local_rank: pid for local_rank, pid in running.pids.items()}
        self.progress = RoundProgress(paths, pids, running.started_unix_s)
        self.pages = ControlPages(self.number)
        self.suspected: Stall | None = None
        self.fence_step = FenceStep.GO_ON
        """As of the last look."""
        self.fence_steps_taken: set[FenceStep] = set()


def unfinished(ranks: Mapping[int, RankProgress], progress: RoundProgress) -> dict[int, Progress]:
    """Return the ranks that must move or end: a process that is done with its black box may yet hang at its end."""
    found: dict[int, Progress] = {}
    for rank, one in ranks.items():
        if not one.is_closed:
            found[rank] = one.progress
        elif is_running(progress.watches[rank].pid):
            found[rank] = replace(one.progress, phase=Phase.STOPPING)
    return found


class RoundFollower:
    """Follows whatever round runs, until `close`."""

    def __init__(self, parts: FollowerParts, seen_command: int) -> None:
        self._parts = parts
        self._followed: _Followed | None = None
        self._desk = CommandDesk(seen_command)
        self._desk_lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = LastingThread("round follower", self._run, self._closed)

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._change_round()
            if self._followed is not None:
                self._look(self._followed)
            self._obey_new_commands()
            self._wake.wait(_LOOK_S)
            self._wake.clear()
        self._forget()

    def _change_round(self) -> None:
        running = self._parts.state.running()
        number = 0 if running is None else running.assignment.round.number
        if self._followed is not None and self._followed.number != number:
            self._forget()
        if running is not None and self._followed is None:
            self._followed = _Followed(running, self._parts.places)
            self._tell_deadlines(number)

    def _tell_deadlines(self, number: int) -> None:
        limits = self._limits(number)
        text = (
            "round %d: should this host lose its lease, its workers go on for %g s after each completed step, and save "
            "and stop after %g s without a lease (recovery.join_timeout_s=%g)"
        )
        _logger.info(text, number, limits.silent_s, limits.save_s, self._parts.fence_rule.join_timeout_s)

    def _forget(self) -> None:
        """A round is over: what it was commanded to save is not to be waited for."""
        if self._followed is not None:
            self._followed.progress.close()
            self._followed = None
            self._settle_checkpoints(self._desk.seen)

    def _look(self, followed: _Followed) -> None:
        ranks = followed.progress.look()
        found = host_progress(ranks, followed.num_ranks, followed.running.started_unix_s)
        self._parts.state.set_progress(followed.number, found)
        self._settle_checkpoints(found.obeyed_command)
        living = unfinished(ranks, followed.progress)
        self._watch_for_stall(followed, living)
        if living:
            self._watch_the_lease(followed, step_silence(living, time.monotonic_ns()))
        self._write_pages(followed)

    def _watch_for_stall(self, followed: _Followed, living: Mapping[int, Progress]) -> None:
        stall = find_stall(living, self._parts.patience, time.monotonic_ns(), time.time())
        is_sure = stall is None or followed.suspected is not None
        followed.suspected = stall
        if not is_sure:
            return
        if stall is not None and self._parts.state.set_stall(followed.number, stall):
            _logger.warning("round %d stands still: %s", followed.number, stall_text(stall))
            self._publish(followed)
        elif stall is None:
            self._parts.state.set_stall(followed.number, None)

    def _watch_the_lease(self, followed: _Followed, silence: StepSilence) -> None:
        """Stop the workers when the job may have gone on without this host; two looks in a row must agree."""
        limits = self._limits(followed.number)
        step, reason = fence(limits, self._lease(), silence)
        is_sure, followed.fence_step = step is followed.fence_step, step
        if not is_sure or step is FenceStep.GO_ON or step in followed.fence_steps_taken:
            return
        followed.fence_steps_taken.add(step)
        _logger.error("round %d: %s", followed.number, reason)
        self._parts.state.set_fenced(followed.number, reason)
        self._parts.orders.stop_round(followed.number, reason, is_saving=step is FenceStep.SAVE)

    def _limits(self, number: int) -> Deadlines:
        told = self._parts.orders.told_deadlines(number)
        return self._parts.fence_rule.deadlines(told.interval_s, told.stop_s)

    def _lease(self) -> LeaseView:
        """Return the lease for fencing: none for a host that cannot learn that its round is over."""
        deaf_s = self._parts.orders.unheard_s - deaf_after_s(self._parts.fence_rule.lease_ttl_s)
        return LeaseView(max(self._parts.membership.lease().gone_s, deaf_s))

    def _publish(self, followed: _Followed) -> None:
        session = self._parts.membership.session
        watches = followed.progress.watches
        found = hang_evidence(self._parts.host, session, followed.number, watches, time.time())
        # asked after the look: whoever is killed in a halted round would seem to be the culprit
        if not self._parts.orders.is_halted(followed.number):
            self._parts.publish(found)

    def _write_pages(self, followed: _Followed) -> None:
        valid_until_ns = time.monotonic_ns() - int(self._lease().gone_s * _NS)
        watches = followed.progress.watches
        paths = {rank: watch.path for rank, watch in watches.items() if watch.reader() is not None}
        followed.pages.set_deadlines(self._parts.orders.told_deadlines(followed.number))
        followed.pages.set_recording(self._parts.orders.diag_settings() or self._parts.recording)
        followed.pages.write(paths, max(1, valid_until_ns), time.time())

    def _obey_new_commands(self) -> None:
        with self._desk_lock:
            fresh = self._desk.take(self._parts.orders.commands_after(self._desk.seen))
        for command in fresh:
            match command.kind:
                case CommandKind.CHECKPOINT if self._followed is not None:
                    self._followed.pages.command_checkpoint(command.number)
                    self._write_pages(self._followed)
                case CommandKind.CHECK | CommandKind.PAIRS:
                    self._parts.check(command, lambda number=command.number: self._settle(number))  # type: ignore[misc]
                case CommandKind.EVIDENCE if self._followed is not None:
                    self._publish(self._followed)
                    self._settle(command.number)
                case _:
                    self._settle(command.number)
        if fresh:
            self._tell_obeyed()

    def _settle(self, number: int) -> None:
        with self._desk_lock:
            self._desk.settle(number)
        self._tell_obeyed()

    def _settle_checkpoints(self, up_to: int) -> None:
        with self._desk_lock:
            self._desk.settle_checkpoints(up_to)
        self._tell_obeyed()

    def _tell_obeyed(self) -> None:
        with self._desk_lock:
            obeyed = self._desk.obeyed
        self._parts.state.set_obeyed(obeyed)
