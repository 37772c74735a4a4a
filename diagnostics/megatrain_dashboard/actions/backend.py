"""The backend carries out actions that were checked.

Requests go to the driver, as from the command line; all other actions are written to etcd.
The page gets the first answer of the driver. The later effect appears as an incident, or as a step with a checkpoint.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, RequestKind
from megatrain.contracts.records.rounds import JobEnd
from megatrain_dashboard.actions.checks import ASKED_KINDS, HOST_KINDS, VERDICT_KINDS
from megatrain_dashboard.actions.document import ActionRequest
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.cordons import cordon_host, uncordon_host
from megatrain_job.jobs.recording import change_recording, configured_period, switched
from megatrain_job.jobs.send_request import ACCEPT_S, make_request, request_events
from megatrain_job.jobs.snapshot import JobSnapshot, read_job


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action, as far as it is known when the page gets its response."""

    is_accepted: bool
    is_done: bool
    text: str


class ActionBackend(Protocol):
    """The interface of a backend."""

    def read_snapshot(self) -> JobSnapshot:
        """Return the current state of the job. Raises: CoordinationError."""

    def carry_out(self, request: ActionRequest, by: str) -> Outcome:
        """Carry out an action and return its outcome. An etcd failure is also returned as an outcome."""


class EtcdBackend:
    """Acts on a job through its etcd. Thread-safe."""

    def __init__(self, client: EtcdClient, keys: JobKeys, *, accept_s: float = ACCEPT_S) -> None:
        self._client, self._keys, self._accept_s = client, keys, accept_s

    def read_snapshot(self) -> JobSnapshot:
        return read_job(self._client, self._keys)

    def carry_out(self, request: ActionRequest, by: str) -> Outcome:
        try:
            return self._asked(request, by) if request.kind in ASKED_KINDS else self._written(request, by)
        except CoordinationError as error:
            unsure = "; it is not known whether it was done" if error.may_have_applied else ""
            return Outcome(is_accepted=False, is_done=True, text=f"{error}{unsure}")

    def _asked(self, request: ActionRequest, by: str) -> Outcome:
        of_driver = make_request(
            RequestKind(request.kind),
            host=request.target if request.kind in HOST_KINDS else "",
            verdict=request.target if request.kind in VERDICT_KINDS else "",
            reason=request.reason,
            by=by,
        )
        accept_s = self._accept_s
        with closing(
            request_events(self._client, self._keys, of_driver, timeout_s=accept_s, accept_s=accept_s)
        ) as events:
            for event in events:
                match event:  # all other events come after an answer
                    case Answer():
                        return Outcome(event.is_accepted, event.is_done, event.text)
                    case JobEnd():
                        text = f"the job has ended with exit code {event.exit_code}: {event.reason}"
                        return Outcome(is_accepted=False, is_done=True, text=text)
        raise AssertionError("request_events ends by raising")

    def _written(self, request: ActionRequest, by: str) -> Outcome:
        match request.kind:
            case "cordon":
                cordon, is_new = cordon_host(self._client, self._keys, request.target, reason=request.reason, by=by)
                text = (
                    f"{request.target} is cordoned: no round uses it from now on"
                    if is_new
                    else f"{request.target} was cordoned already, by {cordon.by}: {cordon.reason}"
                )
            case "uncordon":
                was_cordoned = uncordon_host(self._client, self._keys, request.target)
                text = (
                    f"{request.target} is no longer cordoned: the next round may use it"
                    if was_cordoned
                    else f"{request.target} was not cordoned"
                )
            case _:
                text = self._switch(request, by)
        return Outcome(is_accepted=True, is_done=True, text=text)

    def _switch(self, request: ActionRequest, by: str) -> str:
        is_on, period = request.kind == "diag-on", configured_period(self._client, self._keys)
        change_recording(
            self._client,
            self._keys,
            period,
            lambda before: replace(
                switched(before, is_on=is_on, period=period), by=by, reason=request.reason, at_unix_s=time.time()
            ),
        )
        return f"ranks time {'all operations, with the configured sample period' if is_on else 'no operations'}"
