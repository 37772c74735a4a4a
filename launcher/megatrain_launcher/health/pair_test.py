"""This host's side of a timed all-reduce with a partner: agreeing on it, running it, and reporting it.

The partners meet at the store that one of their executors provides anyway. A bad result makes no host unfit by itself:
`pairs.judge_pairs` finds the culprit from the results of all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult, HostRecord
from megatrain_launcher.health.child import ProbeRunner, device_environment, run_probe
from megatrain_launcher.health.forked import measurements
from megatrain_launcher.health.pairs import PairResult

NAME = "pair"
_NOTHING: Mapping[str, float] = {}
START_S = 60.0
"""How long loading torch may take, beyond the time limit of meeting and measuring."""


@dataclass(frozen=True, slots=True)
class PairTask:
    """The settings with which one host meets its partner."""

    host: str
    partner: str
    side: int
    """0: the host whose store both use."""
    store_address: str
    store_port: int
    prefix: str
    """Prefix of keys in that store; no other pair or turn has it."""
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
    """Return this host's task in the "pairs" command of that number; both partners come to the same agreement."""
    side = 0 if own.host < partner.host else 1
    offering = own if side == 0 else partner
    return PairTask(
        own.host,
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
    """Meet the partner, measure and return the result; blocks up to the time limit and START_S.

    On a CPU the result has no unit: others use it meanwhile, perhaps even the partner, so its times are not judged.
    """
    began = time.monotonic()
    unit = ""
    arguments = [
        f"--device={task.device}",
        f"--num-workers={task.num_workers}",
        f"--side={task.side}",
        f"--store-address={task.store_address}",
        f"--store-port={task.store_port}",
        f"--prefix={task.prefix}",
        f"--timeout-s={task.timeout_s:g}",
    ]
    parts: Mapping[str, float]
    try:
        end = probe(
            "pair_probe",
            arguments,
            environment=device_environment(environment, task.network_interface),
            deadline_s=task.timeout_s + START_S,
        )
    except OSError as error:
        parts, reason = _NOTHING, f"no process can be started: {error.strerror}"
    else:
        lines = [line for line in measurements(end.output) if line["part"] == NAME]
        parts, reason = _parts(lines, "" if end.is_complete else end.problem)
        unit = "ms" if any(line.get("kind") == "cuda" for line in lines) else ""
    taken_s = time.monotonic() - began
    if reason:
        detail = f"all-reduce with {task.partner} failed: {reason}"
        return CheckResult(NAME, CheckOutcome.WARNING, detail, taken_s, None, unit, task.partner, parts)
    value = parts["reduce"] * 1000
    detail = f"all-reduce with {task.partner}: {value:.2f} ms; own matrix product {parts['compute'] * 1000:.2f} ms"
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
    """Return the times of the slowest rank of this side by part, and the reason if it failed."""
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
