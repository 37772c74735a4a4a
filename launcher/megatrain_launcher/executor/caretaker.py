"""The thread that keeps the executor itself in order: a new life when it was fenced, its hearing, and its way out.

It looks whenever orders or the lease change, and twice a second.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.job_requests import JobRequest, RequestKind
from megatrain.contracts.record import encode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.coordination.lease_keeper import LeaseState
from megatrain_launcher.executor.hearing import Hearing
from megatrain_launcher.executor.host_state import HostState
from megatrain_launcher.executor.liveness import LivenessPort
from megatrain_launcher.executor.membership import Judge, Membership
from megatrain_launcher.executor.orders import OrderBook
from megatrain_launcher.executor.settings import new_session
from megatrain_launcher.executor.stopping import StopStep, StopView, next_step

_logger = logging.getLogger(__name__)
_LOOK_S = 0.5
_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class CaretakerParts:
    client: EtcdClient
    keys: JobKeys
    host: str
    orders: OrderBook
    membership: Membership
    liveness: LivenessPort
    state: HostState
    hearing: Hearing
    on_stop: Callable[[], None]
    """Called when the workers have something new to obey."""


@dataclass(slots=True)
class _Stop:
    """A stop that somebody asked for, and how far it has come. Times are monotonic."""

    reason: str
    began: float
    has_trained: bool
    asked: float | None = None
    saved_here: float | None = None
    idle_since: float | None = None


class Caretaker:
    """Runs until `close`. `stop` and `kill` may be called from a signal handler."""

    def __init__(self, parts: CaretakerParts) -> None:
        self._parts = parts
        self._stop_reason = ""
        self._kill_reason = ""
        self._stop: _Stop | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = LastingThread("caretaker", self._run, self._closed)

    @property
    def stop_reason(self) -> str:
        """Why this executor stops; empty without a request to stop."""
        return self._kill_reason or self._stop_reason

    @property
    def was_killed(self) -> bool:
        return bool(self._kill_reason)

    def wake(self) -> None:
        self._wake.set()

    def stop(self, reason: str) -> None:
        """Have the job saved and stopped, at the next look. Takes no lock."""
        self._stop_reason = self._stop_reason or reason

    def kill(self, reason: str) -> None:
        """Have the workers of this host killed, and leave. Takes no lock."""
        self._kill_reason = reason

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._look()
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _look(self) -> None:
        parts = self._parts
        session = new_session()
        if parts.orders.begin_life(session):
            _logger.warning("the job went on without host %s: it comes back as session %s", parts.host, session)
            parts.liveness.session = session
            parts.state.begin_life()
            parts.membership.begin_life(session)
        self._judge_hearing()
        if parts.membership.replaced:
            parts.orders.leave(parts.membership.replaced)
        elif self._kill_reason:
            parts.orders.leave(self._kill_reason)
            parts.on_stop()
        elif self._stop_reason:
            self._go_on_stopping()

    def _judge_hearing(self) -> None:
        orders, membership = self._parts.orders, self._parts.membership
        is_held = membership.keeper.state is LeaseState.HELD
        reason = self._parts.hearing.look(
            time.monotonic(), orders.unheard_s, orders.trouble, is_lease_held=is_held
        )  # fmt: skip
        if membership.judge(Judge.HEARING, reason):
            if reason:
                _logger.error("this host is not fit to take part: %s", reason)
            else:
                _logger.info("this host receives its orders again")

    def _go_on_stopping(self) -> None:
        view, now = self._parts.orders.view(), time.monotonic()
        if self._stop is None:
            _logger.warning("host %s stops: %s", self._parts.host, self._stop_reason)
            self._stop = _Stop(self._stop_reason, now, has_trained=bool(view.taken))
        stop = self._stop
        if view.taken:
            stop.has_trained, stop.idle_since = True, None
        elif stop.idle_since is None:
            stop.idle_since = now

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - stop.began

        step = next_step(
            StopView(
                is_training=bool(view.taken),
                has_trained=stop.has_trained,
                is_halted=self._parts.orders.is_halted(view.taken),
                asked_at_s=since(stop.asked),
                saved_here_at_s=since(stop.saved_here),
                idle_since_s=since(stop.idle_since),
                now_s=now - stop.began,
            )
        )
        match step:
            case StopStep.ASK_DRIVER:
                stop.asked = now
                self._ask_driver(stop)
            case StopStep.SAVE_HERE:
                stop.saved_here = now
                self._parts.orders.save_and_stop(f"{stop.reason}, and no driver answers")
                self._parts.on_stop()
            case StopStep.LEAVE:
                self._parts.orders.leave(stop.reason)
            case StopStep.WAIT:
                pass

    def _ask_driver(self, stop: _Stop) -> None:
        request_id = f"stop-{self._parts.host}-{secrets.token_hex(4)}"
        request = JobRequest(
            request_id, RequestKind.STOP, by=f"executor@{self._parts.host}", created_unix_s=time.time(),
            reason=stop.reason, exit_code=ExitCode.SAVED_AND_STOPPED,
        )  # fmt: skip
        try:
            self._parts.client.put(self._parts.keys.request(request_id), encode(request), deadline_s=_ASK_S)
        except CoordinationError as error:
            _logger.warning("the driver cannot be asked to stop the job: %s", error)
            self._parts.orders.save_and_stop(f"{stop.reason}, and etcd is out of reach")
            stop.saved_here = time.monotonic()
            self._parts.on_stop()
