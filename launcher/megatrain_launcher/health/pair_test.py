"""This host's side of a timed all-reduce with a partner host: its parameters, the run, and the result.

The partners use the store that one of their executors already provides. A single bad result makes no host unfit:
`pairs.judge_pairs` finds the culprit from the results of all pairs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult, HostRecord
from megatrain.contracts.records.record import encode
from megatrain_launcher.health.child import ProbeRunner, device_environment, run_probe
from megatrain_launcher.health.forked import measurements
from megatrain_launcher.health.pairs import PairResult

NAME = "pair"
START_S = 60.0
"""Time to load torch, in addition to the time limit for the all-reduce."""


@dataclass(frozen=True, slots=True)
class PairTask:
    """One host's parameters of an all-reduce with its partner: the argument of the probe."""

    partner: str
    side: int
    """0 for the host whose store both use, 1 for its partner."""
    store_address: str
    store_port: int
    prefix: str
    """The prefix of keys in that store; unique to this pair and turn."""
    num_workers: int
    device: str
    network_interface: str
    timeout_s: float


def pair_task(
    own: HostRecord,
    partner: HostRecord,
    command: int,
    *,
    device: str,
    network_interface: str,
    timeout_s: float,
) -> PairTask:
    """Return this host's task in the "pairs" command with the number `command`.

    Both partners derive the same store and prefix.
    """
    side = 0 if own.host < partner.host else 1
    offering = own if side == 0 else partner
    return PairTask(
        partner.host,
        side,
        offering.address,
        offering.store_port,
        f"pairs/{command}/{offering.host}",
        min(own.num_workers, partner.num_workers),
        device,
        network_interface,
        timeout_s,
    )


def run_pair(task: PairTask, environment: Mapping[str, str], probe: ProbeRunner = run_probe) -> CheckResult:
    """Run the all-reduce with the partner and return the result; blocks up to the time limit plus START_S.

    On a CPU the result has no unit, so its times are not judged: other programs, even the partner, may use the CPU.
    """
    began = time.monotonic()
    unit = ""
    parts: Mapping[str, float] = {}
    try:
        end = probe(
            "pair_probe",
            [encode(task).decode()],
            environment=device_environment(environment, task.network_interface),
            deadline_s=task.timeout_s + START_S,
        )
    except OSError as error:
        reason = f"no process can be started: {error.strerror}"
    else:
        lines = [line for line in measurements(end.output) if line["part"] == NAME]
        parts, reason = _parts(lines, "" if end.is_complete else end.problem)
        unit = "ms" if any(line.get("device_type") == "cuda" for line in lines) else ""
    taken_s = time.monotonic() - began
    if reason:
        detail = f"all-reduce with {task.partner} failed: {reason}"
        return CheckResult(NAME, CheckOutcome.WARNING, detail, taken_s, None, unit, task.partner, parts)
    value = parts["reduce"] * 1000
    compute_ms = parts["compute"] * 1000
    detail = f"all-reduce with {task.partner}: {value:.2f} ms; own matrix multiplication {compute_ms:.2f} ms"
    return CheckResult(NAME, CheckOutcome.PASSED, detail, taken_s, value, unit, task.partner, parts)


def pair_results(report: CheckReport) -> tuple[PairResult, ...]:
    """Return the pair results in a host's report."""
    return tuple(
        PairResult(
            report.host,
            result.partner,
            result.parts_s.get("compute"),
            result.parts_s.get("wait"),
            result.parts_s.get("reduce"),
            "" if "reduce" in result.parts_s else result.detail,
            is_timed=bool(result.unit),
        )
        for result in report.results
        if result.name == NAME and result.partner
    )


def _parts(lines: Sequence[Mapping[str, object]], problem: str) -> tuple[dict[str, float], str]:
    """Return, by part, the longest time among this side's ranks, and the reason if the test failed."""
    worst: dict[str, float] = {}
    for line in lines:
        for part in ("compute", "wait", "reduce"):
            value = line.get(f"{part}_s")
            if isinstance(value, float):
                worst[part] = max(worst.get(part, 0.0), value)
    errors = [str(line["error"]) for line in lines if "error" in line]
    reason = "; ".join(errors) or problem or ("" if lines else "no measurement")
    if reason:
        worst.pop("reduce", None)
    return worst, reason
