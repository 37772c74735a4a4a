"""Handles the action requests of people. No action is carried out twice.

The handler checks in this order whether the key of an action is known already, whether the action fits the job, and
whether it is within the limits. It then writes the action to the audit, and only then carries it out. Actions
are ordered by their arrival at the check of the limits.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from megatrain.contracts.errors import CoordinationError
from megatrain.formatting import printable
from megatrain.run_files.action_log import INTENT, RESULT, ActionEntry, ActionLog, ActionTrail
from megatrain_dashboard.actions.backend import ActionBackend, Outcome
from megatrain_dashboard.actions.checks import check_request, effect_of
from megatrain_dashboard.actions.document import ActionAnswer, ActionRequest
from megatrain_dashboard.actions.limits import excess
from megatrain_dashboard.responses.errors import RefusalError, conflict, too_many, unavailable
from megatrain_dashboard.security.roles import Caller
from megatrain_job.jobs.notes import NoteWriter
from megatrain_job.jobs.snapshot import JobSnapshot

_MAX_KNOWN = 1000
_MAX_IN_FLIGHT = 4
"""Each action in flight holds a thread until the driver answers."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A request that was accepted, the user who sent it, and its answer once there is one."""

    content: tuple[str, str, str]
    user: str
    answer: Future[ActionAnswer]


class ActionHandler:
    """Checks, audits and carries out action requests. Thread-safe."""

    def __init__(self, backend: ActionBackend, log: ActionLog, *, clock: Callable[[], float] = time.time) -> None:
        self._backend, self._log, self._clock = backend, log, clock
        self.notes = NoteWriter(log, clock=clock)
        """Notes that people write on the run. They are in the same audit, but send no request to the driver."""
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._num_in_flight = 0

    def take(self, request: ActionRequest, caller: Caller) -> ActionAnswer:
        """Carry out an action for a caller who may act; for a dry run, describe its effect. Raises: RefusalError."""
        if request.is_dry_run:
            snapshot = self._checked(request)
            self._check_limits(request, snapshot, self._trail())
            return ActionAnswer(
                action_id="", is_dry_run=True, is_accepted=True, is_done=True, text=effect_of(request, snapshot)
            )
        known, is_new = self._known_or_new(request, caller)
        if not is_new:
            return known.answer.result()
        try:
            answer = self._carried_out(request, caller)
        except BaseException as error:
            with self._lock:  # a refused request may be sent again; one that was begun is in the audit
                self._known.pop(request.idempotency_key, None)
            known.answer.set_exception(error)
            raise
        known.answer.set_result(answer)
        return answer

    def trail(self) -> ActionTrail:
        """Return the audited actions so far. Raises: OSError."""
        return self._log.trail()

    def _known_or_new(self, request: ActionRequest, caller: Caller) -> tuple[_Known, bool]:
        """Return the entry of a request's key, and whether this call must carry it out. Raises: RefusalError."""
        content = (request.kind, request.target, request.reason)
        with self._lock:
            known = self._known.get(request.idempotency_key) or self._recorded(request.idempotency_key)
            if known is not None:
                if known.content != content or known.user != caller.user:
                    raise conflict("this idempotency_key belongs to another request; make a new one")
                return known, False
            new = self._known[request.idempotency_key] = _Known(content, caller.user, Future())
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return new, True

    def _recorded(self, key: str) -> _Known | None:
        """Return a request that another server, or this one before a restart, accepted. Raises: RefusalError."""
        found = [entry for entry in self._trail().entries if entry.idempotency_key == key]
        if not found:
            return None
        newest = found[-1]
        if newest.stage != RESULT:
            raise conflict(f"action {newest.action_id} of this key was begun, but its result was not recorded")
        known = _Known((newest.kind, newest.target, newest.reason), newest.user, Future())
        known.answer.set_result(ActionAnswer.of(newest, is_dry_run=False))
        return known

    def _carried_out(self, request: ActionRequest, caller: Caller) -> ActionAnswer:
        snapshot = self._checked(request)
        with self._lock:
            if self._num_in_flight >= _MAX_IN_FLIGHT:
                raise unavailable("other actions are in progress; try again when they are done")
            intent = self._begin(self._intent(request, caller), lambda past: self._check_begin(request, snapshot, past))
            self._num_in_flight += 1
        try:
            outcome = self._backend.carry_out(request, f"{printable(caller.user)} via dashboard")
        except Exception as error:
            self._finish(
                intent, Outcome(is_accepted=False, is_done=True, text=f"internal error of the dashboard: {error}")
            )
            raise
        finally:
            with self._lock:
                self._num_in_flight -= 1
        return ActionAnswer.of(self._finish(intent, outcome), is_dry_run=False)

    def _checked(self, request: ActionRequest) -> JobSnapshot:
        try:
            snapshot = self._backend.read_snapshot()
        except CoordinationError as error:
            raise unavailable(f"etcd does not answer: {error}", retry_after_s=5) from error
        check_request(request, snapshot)
        return snapshot

    def _check_limits(self, request: ActionRequest, snapshot: JobSnapshot, trail: ActionTrail) -> None:
        newest = snapshot.newest_round
        hosts = snapshot.hosts.keys() | ({part.host for part in newest.hosts} if newest is not None else set())
        found = excess(request.kind, request.target, trail.entries, len(hosts), self._clock())
        if found is not None:
            raise too_many(found.text, retry_after_s=round(found.wait_s) + 1)

    def _trail(self) -> ActionTrail:
        try:
            return self._log.trail()
        except OSError as error:
            raise _no_audit(error) from error

    def _intent(self, request: ActionRequest, caller: Caller) -> ActionEntry:
        return ActionEntry(
            at_unix_s=self._clock(),
            stage=INTENT,
            action_id=f"{int(self._clock() * 1000):013d}-{secrets.token_hex(4)}",
            idempotency_key=request.idempotency_key,
            user=caller.user,
            role=caller.role,
            address=caller.address,
            kind=request.kind,
            target=request.target,
            reason=request.reason,
        )

    def _finish(self, intent: ActionEntry, outcome: Outcome) -> ActionEntry:
        """Write the result of an action to the audit. If that fails, the answer reports it, as the action was done."""
        result = replace(
            intent, at_unix_s=self._clock(), stage=RESULT, is_accepted=outcome.is_accepted, is_done=outcome.is_done,
            text=outcome.text,
        )  # fmt: skip
        try:
            return self._log.append(result)
        except OSError as error:
            return replace(result, text=f"{outcome.text} (the audit could not be written: {error.strerror or error})")

    def _check_begin(self, request: ActionRequest, snapshot: JobSnapshot, past: ActionTrail) -> None:
        """Refuse an action that another server of this job began meanwhile, or whose limit it used up."""
        if any(entry.idempotency_key == request.idempotency_key for entry in past.entries):
            raise conflict("this idempotency_key was used a moment ago; send the request again for its result")
        self._check_limits(request, snapshot, past)

    def _begin(self, entry: ActionEntry, check: Callable[[ActionTrail], None]) -> ActionEntry:
        try:
            return self._log.append(entry, check)
        except OSError as error:
            raise _no_audit(error) from error


def _no_audit(error: OSError) -> RefusalError:
    return unavailable(f"nothing was done: the audit cannot be written or read: {error.strerror or error}")
