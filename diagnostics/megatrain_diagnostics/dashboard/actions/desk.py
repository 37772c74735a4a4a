"""Where wishes of people arrive: checked, limited, written into the audit, carried out, and never carried out twice.

A wish goes through in this order: is it known already; may it be at all; does it fit the job; is it within the limits;
then the audit holds it, and only then it is done. The order of two wishes is that in which they come to the limits.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from megatrain.contracts.action_log import INTENT, RESULT, ActionEntry, ActionLog, ActionTrail
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.printable import printable
from megatrain.jobs.notes import NoteBook
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.dashboard.actions.carrying import Hands, Outcome
from megatrain_diagnostics.dashboard.actions.checks import check_wish, what_it_does
from megatrain_diagnostics.dashboard.actions.document import ActionAnswer, ActionRequest
from megatrain_diagnostics.dashboard.actions.limits import excess
from megatrain_diagnostics.dashboard.answers.errors import RefusalError, conflict, too_many, unavailable
from megatrain_diagnostics.dashboard.security.roles import Caller

_MAX_KNOWN = 1000
_MAX_IN_FLIGHT = 4
"""Each holds a thread for as long as the driver takes to answer."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A request that was accepted, who made it, and its answer once there is one."""

    wish: tuple[str, str, str]
    user: str
    answer: Future[ActionAnswer]


class ActionDesk:
    """Takes wishes. For any threads."""

    def __init__(self, hands: Hands, log: ActionLog, *, clock: Callable[[], float] = time.time) -> None:
        self._hands, self._log, self._clock = hands, log, clock
        self.notes = NoteBook(log, clock=clock)
        """Notes that people write on the run: in the same audit, without a request to the driver."""
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._num_in_flight = 0

    def take(self, wish: ActionRequest, caller: Caller) -> ActionAnswer:
        """Carry out a wish of somebody who may act, or say what it would do. Raises: RefusalError."""
        if wish.is_dry_run:
            snapshot = self._checked(wish)
            self._check_limits(wish, snapshot, self._trail())
            return ActionAnswer(
                action_id="", is_dry_run=True, is_accepted=True, is_done=True, text=what_it_does(wish, snapshot)
            )
        known, is_ours = self._known_or_new(wish, caller)
        if not is_ours:
            return known.answer.result()
        try:
            answer = self._carried_out(wish, caller)
        except BaseException as error:
            with self._lock:  # it was never begun: the same wish may come again
                self._known.pop(wish.idempotency_key, None)
            known.answer.set_exception(error)
            raise
        known.answer.set_result(answer)
        return answer

    def trail(self) -> ActionTrail:
        """Return what was done so far. Raises: OSError."""
        return self._log.trail()

    def _known_or_new(self, wish: ActionRequest, caller: Caller) -> tuple[_Known, bool]:
        """Return what stands for a wish's key, and whether this call has to carry it out. Raises: RefusalError."""
        content = (wish.kind, wish.target, wish.reason)
        with self._lock:
            known = self._known.get(wish.idempotency_key) or self._recorded(wish.idempotency_key)
            if known is not None:
                if known.wish != content or known.user != caller.user:
                    raise conflict("this idempotency_key stands for another wish; make a new one")
                return known, False
            new = self._known[wish.idempotency_key] = _Known(content, caller.user, Future())
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return new, True

    def _recorded(self, key: str) -> _Known | None:
        """Return a wish that an earlier life of the server, or another one, took up. Raises: RefusalError."""
        found = [one for one in self._trail().entries if one.idempotency_key == key]
        if not found:
            return None
        newest = found[-1]
        if newest.stage != RESULT:
            raise conflict(f"action {newest.action_id} of this key was begun, and how it ended was never written down")
        known = _Known((newest.kind, newest.target, newest.reason), newest.user, Future())
        known.answer.set_result(_answer(newest))
        self._known[key] = known
        return known

    def _carried_out(self, wish: ActionRequest, caller: Caller) -> ActionAnswer:
        snapshot = self._checked(wish)
        with self._lock:
            if self._num_in_flight >= _MAX_IN_FLIGHT:
                raise unavailable("other actions wait for their answer; try again when they have it")
            intent = self._begin(self._intent(wish, caller), lambda past: self._check_begin(wish, snapshot, past))
            self._num_in_flight += 1
        try:
            outcome = self._hands.carry_out(wish, f"{printable(caller.user)} via dashboard")
        except Exception as error:
            self._finish(intent, Outcome(is_accepted=False, is_done=True, text=f"a mistake of the dashboard: {error}"))
            raise
        finally:
            with self._lock:
                self._num_in_flight -= 1
        return _answer(self._finish(intent, outcome))

    def _checked(self, wish: ActionRequest) -> JobSnapshot:
        try:
            snapshot = self._hands.look()
        except CoordinationError as error:
            raise unavailable(f"etcd does not answer: {error}", retry_after_s=5) from error
        check_wish(wish, snapshot)
        return snapshot

    def _check_limits(self, wish: ActionRequest, snapshot: JobSnapshot, trail: ActionTrail) -> None:
        newest = snapshot.newest_round
        hosts = snapshot.hosts.keys() | ({part.host for part in newest.hosts} if newest is not None else set())
        found = excess(wish.kind, wish.target, trail.entries, len(hosts), self._clock())
        if found is not None:
            raise too_many(found.text, retry_after_s=round(found.wait_s) + 1)

    def _trail(self) -> ActionTrail:
        try:
            return self._log.trail()
        except OSError as error:
            raise _no_audit(error) from error

    def _intent(self, wish: ActionRequest, caller: Caller) -> ActionEntry:
        return ActionEntry(
            at_unix_s=self._clock(),
            stage=INTENT,
            action_id=f"{int(self._clock() * 1000):013d}-{secrets.token_hex(4)}",
            idempotency_key=wish.idempotency_key,
            user=caller.user,
            role=caller.role,
            address=caller.address,
            kind=wish.kind,
            target=wish.target,
            reason=wish.reason,
        )

    def _finish(self, intent: ActionEntry, outcome: Outcome) -> ActionEntry:
        """Write down how an action ended; where that fails its answer says so, for it was done."""
        result = replace(
            intent, at_unix_s=self._clock(), stage=RESULT, is_accepted=outcome.is_accepted, is_done=outcome.is_done,
            text=outcome.text,
        )  # fmt: skip
        try:
            return self._log.append(result)
        except OSError as error:
            return replace(result, text=f"{outcome.text} (the audit could not be written: {error.strerror or error})")

    def _check_begin(self, wish: ActionRequest, snapshot: JobSnapshot, past: ActionTrail) -> None:
        """Refuse what another server of this job has begun meanwhile, or has used up the limits of."""
        if any(one.idempotency_key == wish.idempotency_key for one in past.entries):
            raise conflict("this idempotency_key was used a moment ago; ask again for its result")
        self._check_limits(wish, snapshot, past)

    def _begin(self, entry: ActionEntry, check: Callable[[ActionTrail], None]) -> ActionEntry:
        try:
            return self._log.append(entry, check)
        except OSError as error:
            raise _no_audit(error) from error


def _answer(entry: ActionEntry) -> ActionAnswer:
    return ActionAnswer(
        action_id=entry.action_id,
        is_dry_run=False,
        is_accepted=entry.is_accepted,
        is_done=entry.is_done,
        text=entry.text,
    )


def _no_audit(error: OSError) -> RefusalError:
    return unavailable(f"nothing was done: the audit cannot be written or read: {error.strerror or error}")
