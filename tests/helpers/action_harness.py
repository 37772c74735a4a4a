"""A handler of action requests on a fake backend, with a clock that tests set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_verdict import (
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.run_files.action_log import (
    ActionLog,
)
from megatrain_dashboard.actions.backend import Outcome
from megatrain_dashboard.actions.document import ActionAnswer, ActionRequest
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.security.roles import Caller, Proof, Role
from megatrain_job.jobs.snapshot import JobSnapshot
from tests.helpers.launched_job import NOW_S, make_snapshot

ADA = Caller("ada", Role.OPERATOR, Proof.PROXY, "10.0.0.7")
BOB = Caller("bob", Role.OPERATOR, Proof.PROXY, "10.0.0.8")

VERDICT = HostVerdict(
    verdict_id="v-1", kind=VerdictKind.STRAGGLER, round=2, cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH,
    created_unix_s=NOW_S, by="d1", hosts=("host-2",),
)  # fmt: skip
WAITING = VerdictOutcome("v-1", OutcomeKind.WAITING, "gains 300 s for 60 s", "host-1", NOW_S)


def request_of(kind: str = "checkpoint", target: str = "", key: str = "key-00000001", **changed: Any) -> ActionRequest:
    given = {
        "kind": kind, "target": target, "reason": "before maintenance", "confirmation": "demo", "idempotency_key": key,
    }  # fmt: skip
    return ActionRequest(**{**given, **changed})


@dataclass
class FakeBackend:
    """Executes nothing, and records the requests."""

    snapshot: JobSnapshot = field(default_factory=make_snapshot)
    outcome: Outcome = field(default_factory=lambda: Outcome(is_accepted=True, is_done=False, text="being done"))
    done: list[tuple[ActionRequest, str]] = field(default_factory=list)
    problem: str = ""
    before: Callable[[], None] = lambda: None

    def read_snapshot(self) -> JobSnapshot:
        if self.problem:
            raise CoordinationError(self.problem)
        return self.snapshot

    def carry_out(self, request: ActionRequest, by: str) -> Outcome:
        self.before()
        self.done.append((request, by))
        return self.outcome


class ActionHarness:
    """A handler of action requests on a fake backend, with a clock that tests set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = NOW_S
        self.backend = FakeBackend()
        self.handler = self.opened()

    def opened(self) -> ActionHandler:
        self.log = ActionLog(self.path)
        return ActionHandler(self.backend, self.log, clock=lambda: self.now_s)

    def take(self, *arguments: Any, caller: Caller = ADA, **changed: Any) -> ActionAnswer:
        return self.handler.take(request_of(*arguments, **changed), caller)

    def refused(self, *arguments: Any, **changed: Any) -> RefusalError:
        with pytest.raises(RefusalError) as refusal:
            self.take(*arguments, **changed)
        return refusal.value
