"""Sends a request to the driver, and yields its answers.

Until the driver accepts the request, the request has the requester's lease: if the requester gives up or is killed, the
request is deleted with the lease, and no driver finds it an hour later. An accepted request stays until the driver
deletes it with its last answer. The watch begins at the revision of the request, so that no answer is missed.
"""

from __future__ import annotations

import getpass
import secrets
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError, MegatrainError, UnknownJobError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import CheckReport
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import TURN_MARK, JobEnd
from megatrain.formatting import seconds_text
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import Compare, KeyRange, Put, shown
from megatrain_job.jobs.snapshot import JobSnapshot

ACCEPT_S = 20.0
"""If no driver has answered within this time, none will: a new one is elected soon after the lease of the old one has
run out."""
_LEASE_MARGIN_S = 10
_POLL_S = 0.5
UNREACHABLE_S = 5.0
"""etcd restarts, or elects a leader, in less time."""


class RefusedError(MegatrainError):
    """The driver refuses a request."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class EtcdUnreachable:
    """etcd has been unreachable for a while."""

    reason: str


RequestEvent = Answer | CheckReport | JobEnd | EtcdUnreachable


def make_request(kind: RequestKind, *, host: str = "", reason: str = "", verdict: str = "", by: str = "") -> JobRequest:
    """Return a request of the person at this terminal, or of the person that `by` names."""
    request_id = f"{int(time.time() * 1000):013d}-{secrets.token_hex(4)}"
    return JobRequest(request_id, kind, by or requester(), host, reason, verdict)


def requester() -> str:
    """Return user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # no name for this user id
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def check_accepts_requests(snapshot: JobSnapshot) -> None:
    """Raises: CoordinationError when no driver could carry out a request."""
    job = snapshot.job
    if not snapshot.exists:
        raise UnknownJobError(f"job {job!r}: etcd has no job of this name")
    if snapshot.end is not None:
        raise CoordinationError(f"job {job!r} is over (exit code {snapshot.end.exit_code}): {snapshot.end.reason}")
    if not snapshot.hosts:
        raise CoordinationError(f"job {job!r} is not running: no executor is registered; start it again")
    if not snapshot.driver:
        hint = "try again in a few seconds"
        if not snapshot.has_driver_candidate:
            hint = f"all its hosts were launched with --no-driver; start `megatrain driver {job}`"
        raise CoordinationError(f"job {job!r} has no driver at the moment, so a request would not be answered; {hint}")


def request_events(
    client: EtcdClient,
    keys: JobKeys,
    request: JobRequest,
    *,
    timeout_s: float,
    accept_s: float = ACCEPT_S,
    unreachable_s: float = UNREACHABLE_S,
) -> Generator[RequestEvent, None, None]:
    """Send a request and yield its answers until the consumer stops. After the first answer, yield `EtcdUnreachable`,
    at most once, if etcd is unreachable for `unreachable_s`.

    Raises: CoordinationError when no driver answers within `accept_s`, or the consumer has not stopped within
    `timeout_s`. Then the request is withdrawn, unless a driver has accepted it; while etcd is unreachable, the request
    stays until its lease ends.
    """
    began_s = time.monotonic()
    limit_s = min(accept_s, timeout_s)
    lease = client.grant_lease(round(limit_s) + _LEASE_MARGIN_S)
    problem = ""
    try:
        revision = client.put(keys.request(request.request_id), encode(request), lease_id=lease.lease_id)
        is_answered, gone_since_s, is_gone_reported = False, None, False
        with Watch(client, KeyRange.prefix(keys.prefix), start_revision=revision) as watch:
            while (left_s := began_s + limit_s - time.monotonic()) > 0:
                for event in _read(keys, request, watch.next(min(left_s, _POLL_S))):
                    if isinstance(event, Answer) and not is_answered:
                        is_answered, limit_s = True, timeout_s
                        _detach_lease(client, keys, request, event)
                    yield event
                problem = watch.problem
                now_s = time.monotonic()
                gone_since_s = (gone_since_s or now_s) if problem else None
                if (
                    is_answered
                    and gone_since_s is not None
                    and now_s - gone_since_s > unreachable_s
                    and not is_gone_reported
                ):
                    is_gone_reported = True
                    yield EtcdUnreachable(problem)
        raise _late(keys, request, limit_s, problem, is_answered=is_answered)
    finally:
        if not problem:  # else the request ends with its lease
            with suppress(CoordinationError):
                client.revoke_lease(lease.lease_id, deadline_s=2.0)


def checked(answer: Answer) -> Answer:
    """Return the answer if it is affirmative. Raises: RefusedError if it is not."""
    if not answer.is_accepted:
        raise RefusedError(f"the driver refused: {answer.text}")
    return answer


def _read(keys: JobKeys, request: JobRequest, event: WatchEvent | None) -> Iterator[RequestEvent]:
    for item in () if event is None else event.written:
        location = shown(item.key)
        match keys.parts(item.key.decode(errors="replace")):
            case ("answers", request_id) if request_id == request.request_id:
                yield decode(Answer, item.value, location)
            case ("checks", check_id, _) if check_id.partition(TURN_MARK)[0] == request.request_id:
                yield decode(CheckReport, item.value, location)
            case ("end",):
                yield decode(JobEnd, item.value, location)


def _detach_lease(client: EtcdClient, keys: JobKeys, request: JobRequest, answer: Answer) -> None:
    """Detach the lease from a request that the driver works on, unless the driver has deleted the request meanwhile."""
    if answer.is_accepted and not answer.is_done:
        key = keys.request(request.request_id)
        client.txn([Compare.is_present(key)], [Put(key, encode(request))], is_repeatable=True)


def _late(keys: JobKeys, request: JobRequest, limit_s: float, problem: str, *, is_answered: bool) -> CoordinationError:
    why = f"; etcd: {problem}" if problem else ""
    what = f"job {keys.job!r}: {request.kind} was requested {seconds_text(limit_s)} ago"
    if is_answered:
        return CoordinationError(f"{what} and accepted, but is not done yet (request {request.request_id}){why}")
    fate = "deleted when its lease ends" if problem else "withdrawn"
    return CoordinationError(f"{what}, but no driver accepted it; the request is {fate}{why}")
