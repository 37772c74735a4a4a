"""Carrying out a wish that was checked: the driver is asked as the command line asks it, the rest is written to etcd.

The first answer of the driver is the answer: what becomes of it later is an incident, or a step with a checkpoint.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.job_requests import Answer, RequestKind
from megatrain.contracts.rounds import JobEnd
from megatrain.coordination.client import EtcdClient
from megatrain.jobs.asking import ACCEPT_S, Gone, make_request, news_of
from megatrain.jobs.cordons import cordon_host, uncordon_host
from megatrain.jobs.recording import change_recording, configured_period, switched
from megatrain.jobs.snapshot import JobSnapshot, read_job
from megatrain_diagnostics.dashboard.actions.checks import ASKED_KINDS, HOST_KINDS, VERDICT_KINDS
from megatrain_diagnostics.dashboard.actions.document import ActionRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a wish, as far as it is known when the page is answered."""

    is_accepted: bool
    is_done: bool
    text: str


class Hands(Protocol):
    """Whoever carries out wishes."""

    def look(self) -> JobSnapshot:
        """Return the job as it is now. Raises: CoordinationError."""

    def carry_out(self, wish: ActionRequest, by: str) -> Outcome:
        """Do it, and return what came of it: trouble with etcd is an outcome too."""


class EtcdHands:
    """Acts on a job through its etcd. For any threads."""

    def __init__(self, client: EtcdClient, keys: JobKeys, *, accept_s: float = ACCEPT_S) -> None:
        self._client, self._keys, self._accept_s = client, keys, accept_s

    def look(self) -> JobSnapshot:
        return read_job(self._client, self._keys)

    def carry_out(self, wish: ActionRequest, by: str) -> Outcome:
        try:
            return self._asked(wish, by) if wish.kind in ASKED_KINDS else self._written(wish, by)
        except CoordinationError as error:
            unsure = "; whether it was done is not known" if error.may_have_applied else ""
            return Outcome(is_accepted=False, is_done=True, text=f"{error}{unsure}")

    def _asked(self, wish: ActionRequest, by: str) -> Outcome:
        request = make_request(
            RequestKind(wish.kind),
            host=wish.target if wish.kind in HOST_KINDS else "",
            verdict=wish.target if wish.kind in VERDICT_KINDS else "",
            reason=wish.reason,
            by=by,
        )
        news_s = self._accept_s
        with closing(news_of(self._client, self._keys, request, timeout_s=news_s, accept_s=news_s)) as all_news:
            for news in all_news:
                match news:
                    case Answer():
                        return Outcome(news.is_accepted, news.is_done, news.text)
                    case JobEnd():
                        text = f"the job has ended with exit code {news.exit_code}: {news.reason}"
                        return Outcome(is_accepted=False, is_done=True, text=text)
                    case Gone():
                        return Outcome(is_accepted=False, is_done=True, text=f"etcd does not answer: {news.reason}")
        raise AssertionError("news_of ends by raising")

    def _written(self, wish: ActionRequest, by: str) -> Outcome:
        match wish.kind:
            case "cordon":
                cordon, is_new = cordon_host(self._client, self._keys, wish.target, reason=wish.reason, by=by)
                text = (
                    f"{wish.target} is cordoned: no round uses it from now on"
                    if is_new
                    else f"{wish.target} was cordoned already, by {cordon.by}: {cordon.reason}"
                )
            case "uncordon":
                was_cordoned = uncordon_host(self._client, self._keys, wish.target)
                text = (
                    f"{wish.target} is not cordoned any more: the next round may use it"
                    if was_cordoned
                    else f"{wish.target} was not cordoned"
                )
            case _:
                text = self._switch(wish, by)
        return Outcome(is_accepted=True, is_done=True, text=text)

    def _switch(self, wish: ActionRequest, by: str) -> str:
        is_on, period = wish.kind == "diag-on", configured_period(self._client, self._keys)
        change_recording(
            self._client,
            self._keys,
            period,
            lambda before: replace(
                switched(before, is_on=is_on, period=period), by=by, reason=wish.reason, at_unix_s=time.time()
            ),
        )
        return "ranks time all operations" if is_on else "ranks time nothing"
