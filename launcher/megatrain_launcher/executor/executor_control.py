"""The thread that manages the executor itself: a new session after fencing, the check that orders arrive, and stopping.

It runs whenever orders or the lease change, and twice a second.

After a signal, a host that no round uses leaves at once. A host that trains asks the driver to stop the job, like
`megatrain job stop`. If no driver responds, the host's own workers are asked to save: all ranks then agree on a step
and stop. A second SIGINT kills this host's workers; other further signals do nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseState
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.membership import FitnessCheck, Membership
from megatrain_launcher.executor.order_state import OrderState
from megatrain_launcher.executor.settings import new_session
from megatrain_launcher.liveness import LivenessPort, OrderDelivery

_logger = logging.getLogger(__name__)
_POLL_S = 0.5
_ASK_S = 5.0
HALT_S = 10.0
"""The time that the driver may take to halt the round after the request."""
END_S = 20.0
"""The time that a host waits for the end of the job after its workers are gone."""


class StopAction(Enum):
    """The next action of a stopping executor."""

    WAIT = "wait"
    ASK_DRIVER = "ask the driver"
    SAVE_HERE = "ask this host's workers to save and stop"
    LEAVE = "leave"


@dataclass(slots=True)
class StopProgress:
    """The progress of a requested stop. Times are of the monotonic clock, in seconds; None: not yet."""

    has_trained: bool
    """Whether there have been workers since the stop was requested."""
    asked_at_s: float | None = None
    saved_here_at_s: float | None = None
    idle_since_s: float | None = None


def next_stop_action(now_s: float, stop: StopProgress, *, is_training: bool, is_halted: bool) -> StopAction:
    """Return the next action of a stop. Pure function: it reads no clock.

    `is_training`: whether a round has workers on this host, or is about to start them; `is_halted`: whether that round
    is halted.
    """
    if not is_training:
        waited_s = 0.0 if stop.idle_since_s is None else now_s - stop.idle_since_s
        if not stop.has_trained or stop.saved_here_at_s is not None or waited_s > END_S:
            return StopAction.LEAVE
        return StopAction.WAIT
    if is_halted or stop.saved_here_at_s is not None:
        return StopAction.WAIT
    if stop.asked_at_s is None:
        return StopAction.ASK_DRIVER
    return StopAction.SAVE_HERE if now_s - stop.asked_at_s > HALT_S else StopAction.WAIT


@dataclass(frozen=True, slots=True)
class ExecutorControlParts:
    client: EtcdClient
    keys: JobKeys
    host: str
    orders: OrderState
    membership: Membership
    liveness: LivenessPort
    state: HostStatusBuilder
    delivery: OrderDelivery
    on_stop: Callable[[], None]
    """Called when there is a new order for the workers."""


class ExecutorControl:
    """Runs until `close`. `stop` and `kill` may be called from a signal handler."""

    def __init__(self, parts: ExecutorControlParts) -> None:
        self._parts = parts
        self._stop_reason = ""
        self._kill_reason = ""
        self._stop: StopProgress | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = RestartingThread("executor control", self._run, self._closed)

    @property
    def stop_reason(self) -> str:
        """The reason why this executor stops; empty if it was not asked to."""
        return self._kill_reason or self._stop_reason

    @property
    def was_killed(self) -> bool:
        return bool(self._kill_reason)

    def wake(self) -> None:
        self._wake.set()

    def stop(self, reason: str) -> None:
        """Begin to save and stop the job, at the next check. Takes no lock, so that signal handlers may call it."""
        self._stop_reason = self._stop_reason or reason

    def kill(self, reason: str) -> None:
        """Kill the workers of this host and leave, at the next check. Takes no lock."""
        self._kill_reason = reason

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._poll()
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _poll(self) -> None:
        parts = self._parts
        session = new_session()
        if parts.orders.begin_session(session):
            _logger.warning("the job continued without host %s, which returns with session %s", parts.host, session)
            parts.liveness.session = session
            parts.state.begin_session()
            parts.membership.begin_session(session)
        self._check_order_delivery()
        if parts.membership.replaced:
            parts.orders.leave(parts.membership.replaced)
        elif self._kill_reason:
            parts.orders.leave(self._kill_reason)
            parts.on_stop()
        elif self._stop_reason:
            self._continue_stop()

    def _check_order_delivery(self) -> None:
        orders, membership = self._parts.orders, self._parts.membership
        is_held = membership.keeper.state is LeaseState.HELD
        reason = self._parts.delivery.poll(
            time.monotonic(), orders.unconfirmed_s, orders.problem, is_lease_held=is_held
        )  # fmt: skip
        if membership.set_unfit_reason(FitnessCheck.ORDERS, reason):
            if reason:
                _logger.error("this host is unfit to take part: %s", reason)
            else:
                _logger.info("this host receives its orders again")

    def _continue_stop(self) -> None:
        view, now = self._parts.orders.view(), time.monotonic()
        if self._stop is None:
            _logger.warning("host %s stops: %s", self._parts.host, self._stop_reason)
            self._stop = StopProgress(has_trained=bool(view.taken_round))
        stop = self._stop
        if view.taken_round:
            stop.has_trained, stop.idle_since_s = True, None
        elif stop.idle_since_s is None:
            stop.idle_since_s = now
        is_halted = self._parts.orders.is_halted(view.taken_round)
        match next_stop_action(now, stop, is_training=bool(view.taken_round), is_halted=is_halted):
            case StopAction.ASK_DRIVER:
                stop.asked_at_s = now
                self._ask_driver(stop)
            case StopAction.SAVE_HERE:
                self._save_here(stop, "no driver responds")
            case StopAction.LEAVE:
                self._parts.orders.leave(self._stop_reason)
            case StopAction.WAIT:
                pass

    def _ask_driver(self, stop: StopProgress) -> None:
        request_id = f"stop-{self._parts.host}-{secrets.token_hex(4)}"
        request = JobRequest(
            request_id,
            RequestKind.STOP,
            by=f"executor@{self._parts.host}",
            reason=self._stop_reason,
            exit_code=ExitCode.SAVED_AND_STOPPED,
        )
        try:
            self._parts.client.put(self._parts.keys.request(request_id), encode(request), deadline_s=_ASK_S)
        except CoordinationError as error:
            _logger.warning("the request to stop the job cannot be sent: %s", error)
            self._save_here(stop, "etcd cannot be reached")

    def _save_here(self, stop: StopProgress, why: str) -> None:
        stop.saved_here_at_s = time.monotonic()
        self._parts.orders.save_and_stop(f"{self._stop_reason}, and {why}")
        self._parts.on_stop()
