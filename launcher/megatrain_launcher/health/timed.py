"""Checks the speed of this host's devices, and of an all-reduce among them, against this host's history.

A slow result is measured once more before the host counts as unfit. On a CPU that other programs use at the same time,
a slow result is only a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.contracts.records.host_records import CheckOutcome
from megatrain_launcher.health.child import device_environment
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.forked import measurements
from megatrain_launcher.health.history import HealthHistory

NAMES = ("matmul", "memory-copy", "loopback")
DEADLINE_S = 300.0
_PROBE_S = 140.0
_PART_S = 45.0
BUSY_FRACTION = 0.2
NOISE_S = 0.002
"""Smaller differences are noise of the system."""
_KEYS: Mapping[str, tuple[str, ...]] = {"matmul": ("matmul_s",), "memory-copy": ("copy_s", "host_copy_s")}


@dataclass(frozen=True, slots=True)
class Timings:
    """The measurements of the device probe. `seconds`: by check name, then by device and kind of copy."""

    device_type: str = ""
    hardware: str = ""
    num_devices: int = 0
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """By check name."""
    others_busy: Mapping[str, float | None] = field(default_factory=dict)
    """By part of the probe, the fraction of the cores that other programs used at the same time."""


def check_speed(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Time the devices, and once more if they appear slow."""
    if context.is_training:
        return tuple(skipped(name, "workers are running; timing would disturb them") for name in NAMES)
    findings, is_slow = judge_speed(_measure(context), history, context.recovery.max_slowdown)
    if not is_slow:
        return findings
    again, _ = judge_speed(_measure(context), history, context.recovery.max_slowdown)
    # use the better of both results, so that temporary slowness is ignored
    better = {CheckOutcome.PASSED: 0, CheckOutcome.SKIPPED: 1, CheckOutcome.WARNING: 2, CheckOutcome.FAILED: 3}
    return tuple(min(pair, key=lambda finding: better[finding.outcome]) for pair in zip(again, findings, strict=True))


def judge_speed(
    timings: Timings, history: HealthHistory, max_slowdown: float
) -> tuple[tuple[HealthFinding, ...], bool]:
    """Return the findings, and whether one of them failed only because it was slow."""
    lost = int(history.seen.get("num_cuda_devices", 0)) if timings.device_type == "cpu" else 0
    if lost:
        problem = f"torch sees no CUDA device; at an earlier check it saw {lost}"
        return (failed(NAMES[0], problem), *(skipped(name, problem) for name in NAMES[1:])), False
    findings = [_judge(name, timings, history, max_slowdown) for name in NAMES]
    if timings.device_type == "cuda":
        findings[0] = replace(findings[0], seen={"num_cuda_devices": float(timings.num_devices)})
    is_slow = any(finding.outcome is CheckOutcome.FAILED and finding.name not in timings.errors for finding in findings)
    return tuple(findings), is_slow


def _judge(name: str, timings: Timings, history: HealthHistory, max_slowdown: float) -> HealthFinding:
    if name in timings.errors:
        return failed(name, timings.errors[name])
    seconds = timings.seconds.get(name, {})
    samples = {f"{name}/{timings.hardware}/{unit_name}": taken_s for unit_name, taken_s in seconds.items()}
    slow, compared = [], []
    for unit_name, taken_s in seconds.items():
        usual = history.usual(f"{name}/{timings.hardware}/{unit_name}")
        if usual is None:
            continue
        compared.append(unit_name)
        if taken_s > usual * max_slowdown and taken_s - usual > NOISE_S:
            slow.append(f"{unit_name} {taken_s * 1000:.2f} ms, usually {usual * 1000:.2f}")
    worst = max(seconds.values())
    state = f"{worst * 1000:.2f} ms" + (f" (the slowest of {len(seconds)})" if len(seconds) > 1 else "")
    busy = timings.others_busy.get("loopback" if name == "loopback" else "compute")
    if not slow:
        known = "as usual" if compared else "no history yet to compare with"
        finding = passed(name, f"{state}, {known}")
    elif timings.device_type == "cpu" and busy is not None and busy > BUSY_FRACTION:
        finding = warning(name, f"{', '.join(slow)}: other programs use {busy:.0%} of the CPU")
    else:
        finding = failed(name, f"{', '.join(slow)}; recovery.max_slowdown={max_slowdown:g}")
    return replace(finding, value=worst * 1000, unit="ms", samples=samples)


def timings_of(lines: Sequence[Mapping[str, Any]], problem: str) -> Timings:
    """Return the timings from the probe's lines; `problem`: how the probe failed, empty if it was complete."""
    by_part: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_part.setdefault(str(line["part"]), []).append(line)
    (device,) = by_part.get("device", [{"error": problem or "the probe printed nothing"}])[:1]
    if "error" in device:
        return Timings(errors=dict.fromkeys(NAMES, f"torch cannot use this host's devices: {device['error']}"))
    seconds: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    errors: dict[str, str] = {}
    for line in by_part.get("compute", []):
        if "error" in line:
            errors.update(dict.fromkeys(NAMES[:2], f"device {line['number']}: {line['error']}"))
            continue
        if not line["is_repeatable"]:
            errors["matmul"] = (
                f"{line['device']}: the same operation gave different results: the device computes wrong results"
            )
        for name, keys in _KEYS.items():
            for key in keys:
                if key in line:
                    origin = "" if key == keys[0] else " from the host"
                    seconds[name][f"{line['device']}{origin}{' ' + line['name'] if line['name'] else ''}"] = line[key]
    for line in by_part.get("loopback", []):
        if "error" in line:
            errors.setdefault("loopback", f"rank {line['number']}: {line['error']}")
        else:
            before = seconds["loopback"].get("all-reduce", 0.0)
            seconds["loopback"]["all-reduce"] = max(before, line["reduce_s"])
    for name in NAMES:
        if not seconds[name] and name not in errors:
            errors[name] = f"not measured: {problem or 'the probe printed nothing for it'}"
    loads = {part.removesuffix("-load"): by_part[part][0]["others_busy"] for part in by_part if part.endswith("-load")}
    return Timings(device["device_type"], device["hardware"], device["num_devices"], seconds, errors, loads)


def _measure(context: HealthContext) -> Timings:
    arguments = [context.device, str(context.num_workers), f"{_PART_S:g}"]
    environment = device_environment(context.environment, "lo")
    end = context.probe("device_probe", arguments, environment=environment, deadline_s=_PROBE_S)
    return timings_of(measurements(end.output), "" if end.is_complete else end.problem)
