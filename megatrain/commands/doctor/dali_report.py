"""The finding about NVIDIA DALI, which decodes pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.commands.doctor.finding import DoctorFinding, FindingLevel
from megatrain.commands.doctor.probe import run_probe
from megatrain.data.pictures.dali_package import FoundDali, find_dali

DALI_MARK = "dali-report "
_NAME = "NVIDIA DALI"


def dali_finding() -> DoctorFinding:
    """Return which build is installed, and where it decodes; another process loads it and decodes a picture."""
    found = find_dali()
    if found.problem:
        return describe_dali(found, None, "")
    return describe_dali(found, *run_probe("megatrain.commands.doctor.dali_probe", DALI_MARK))


def describe_dali(found: FoundDali, report: Mapping[str, Any] | None, problem: str) -> DoctorFinding:
    """Return the finding. report: for each device, why DALI cannot decode with it; empty if it can."""
    consequence = f"only pictures need it (`megatrain data pictures`): {found.hint}"
    if not found.package:
        return DoctorFinding(_NAME, found.problem, consequence, FindingLevel.ABSENT)
    if found.problem or report is None:
        return DoctorFinding(_NAME, found.problem or problem, consequence, FindingLevel.WARNING)
    state = f"{found.package} {found.version}"
    able = [device for device, reason in report.items() if not reason]
    unable = [f"not with {device}: {reason}" for device, reason in report.items() if reason]
    text = "; ".join([f"decodes pictures with device={' and '.join(able)}" if able else "decodes no picture", *unable])
    return DoctorFinding(_NAME, state, text, FindingLevel.OK if able else FindingLevel.WARNING)
