"""The finding of one check, before it becomes a line of the report, and what of it the host's history keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.contracts.records.host_records import CheckOutcome


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One finding. `value` with `unit` is the measurement, if there is one."""

    name: str
    outcome: CheckOutcome
    detail: str
    value: float | None = None
    unit: str = ""
    samples: Mapping[str, float] = field(default_factory=dict)
    """Measurements of which the history keeps several; only those of a passed check are kept."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Facts of which the history keeps the last: the number of GPUs, the speed of a link."""


def passed(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.PASSED, detail)


def warning(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.WARNING, detail)


def failed(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.FAILED, detail)


def skipped(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.SKIPPED, detail)
