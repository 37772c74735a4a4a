"""The answers of each place that reports a job's health, and their times: `megatrain status`, the page, and
/metrics."""

from __future__ import annotations

import io
import json
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

from megatrain.cli import main
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.record import decode
from megatrain_launcher.commands.status import StatusCode
from tests.helpers.job_under_launch import LaunchedJobView
from tests.helpers.waiting import DeadlineError, wait_until

INTERFACES = ("status", "page", "metrics")
_ANSWER_S = 1.0
_PAUSE_S = 0.2
"""An answer costs the job more than most faults do."""
_LATE_ADDITIONS = frozenset({"disk-filling", "step-late", "save-late"})
"""The additional time that a busy machine, or its disk, may need for any answer."""
_LIVE = (StatusCode.GREEN, StatusCode.AMBER, StatusCode.RED)


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """One answer: a level, and the codes of the reasons for it."""

    level: str
    codes: frozenset[str]

    @classmethod
    def of(cls, level: str, codes: Sequence[str]) -> HealthAnswer:
        kept = frozenset(codes) - _LATE_ADDITIONS
        return cls(level if kept else "green", kept)


GREEN = HealthAnswer("green", frozenset())
UNREACHABLE = HealthAnswer("red", frozenset({"unreachable"}))


def ask_status(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of `megatrain status`, and the JSON that it prints: none if it prints only an error."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        code = main(["status", *arguments, "--json"])
    return code, json.loads(output.getvalue()) if output.getvalue() else {}


class HealthViews:
    """Requests the health by all public interfaces, and records the answers with their times (unix seconds)."""

    def __init__(self, view: LaunchedJobView, urls: Sequence[str]) -> None:
        self._view = view
        self._arguments = (view.keys.job, "--rdzv-endpoint", ",".join(urls))
        self._page = self._metrics = ""
        self.state = ""
        """The job's activity, by the newest answer of `megatrain status`."""
        self.answers: dict[str, list[tuple[float, HealthAnswer]]] = {name: [] for name in INTERFACES}

    def wait_for(self, is_met: Callable[[], bool], what: str) -> None:
        """Repeat the requests until a condition is met. `megatrain status` takes a second during an etcd outage; it
        delays no other answer."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            status = pool.submit(self._ask, "status", self._status)

            def asked() -> bool:
                nonlocal status
                self._ask("page", self._overview)
                self._ask("metrics", self._health_metric)
                if status.done():
                    status.result()
                    if is_met():
                        return True
                    status = pool.submit(self._ask, "status", self._status)
                return is_met()

            try:
                wait_until(asked, what, pauses_s=(_PAUSE_S, _PAUSE_S))
            except DeadlineError as error:
                newest = {name: found[-3:] for name, found in self.answers.items()}
                raise DeadlineError(f"{error}; the newest answers: {newest}") from None

    def _ask(self, name: str, answer: Callable[[], HealthAnswer]) -> None:
        """Request one answer once. A request without an answer adds nothing."""
        # The server is absent, or ended in the middle of its answer.
        with suppress(OSError, ValueError, CoordinationError):
            reported = answer()
            self.answers[name].append((time.time(), reported))

    def agreement(
        self, code: str, since_unix_s: float, interfaces: Sequence[str] = INTERFACES
    ) -> dict[str, float] | None:
        """Return when each interface gave the same answer; None until all have.

        code: of a reason that the answer must contain; empty: the answer is green.
        """
        first: list[dict[HealthAnswer, float]] = []
        for name in interfaces:
            output = [(at, reported) for at, reported in self.answers[name] if at >= since_unix_s]
            wanted = [
                (at, reported) for at, reported in output if (code in reported.codes if code else reported == GREEN)
            ]
            first.append({reported: at for at, reported in reversed(wanted)})
        common = set(first[0]).intersection(*first[1:])
        if not common:
            return None
        soonest = min(common, key=lambda reported: max(times[reported] for times in first))
        return {name: times[soonest] for name, times in zip(interfaces, first, strict=True)}

    def _status(self) -> HealthAnswer:
        code, answer = ask_status(*self._arguments)
        if code == StatusCode.UNREACHABLE:
            return UNREACHABLE
        self.state = answer["state"]
        health = answer["health"]
        if code in _LIVE:
            assert code == {"green": 0, "amber": 3, "red": 4}[health["level"]]
            self._page = answer["dashboard_url"] or ""
            item = self._view.client.get(self._view.keys.daemon)
            port = 0 if item is None else decode(DaemonRecord, item.value, self._view.keys.daemon).metrics_port
            self._metrics = f"http://127.0.0.1:{port}/metrics" if port else ""
        return HealthAnswer.of(health["level"], [one["code"] for one in health["reasons"]])

    def _overview(self) -> HealthAnswer:
        answer = json.loads(_got(f"{self._page}api/v1/overview"))
        return HealthAnswer.of(answer["level"], [one["code"] for one in answer["reasons"]])

    def _health_metric(self) -> HealthAnswer:
        text = _got(self._metrics)
        (level,) = re.findall(r'^megatrain_job_health\{.*level="(\w+)"\} 1', text, re.MULTILINE)
        return HealthAnswer.of(
            level, re.findall(r'^megatrain_job_health_reasons\{.*code="([\w-]+)"', text, re.MULTILINE)
        )


def _got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
        return str(answer.read().decode())
