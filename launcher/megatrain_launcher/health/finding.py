"""What one check found, before it becomes a line of the report, and what of it the host's history shall remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.contracts.host_records import CheckOutcome


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `value` with `unit` is what was measured, where something was."""

    name: str
    outcome: CheckOutcome
    detail: str
    value: float | None = None
    unit: str = ""
    samples: Mapping[str, float] = field(default_factory=dict)
    """Measurements that the history keeps many of; only those of a check that passed are kept."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Facts that the history keeps the last of: the number of GPUs, the speed of a link."""


def passed(name: str, detail: str) -> Finding:
    return Finding(name, CheckOutcome.PASSED, detail)


def warning(name: str, detail: str) -> Finding:
    return Finding(name, CheckOutcome.WARNING, detail)


def failed(name: str, detail: str) -> Finding:
    return Finding(name, CheckOutcome.FAILED, detail)


def skipped(name: str, detail: str) -> Finding:
    return Finding(name, CheckOutcome.SKIPPED, detail)
