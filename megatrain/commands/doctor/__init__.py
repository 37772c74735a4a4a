"""`megatrain doctor`: the hardware and software of this machine, and what they allow for training.

Loads neither torch nor numpy: a child process imports torch and reports, so that the doctor also works on a
machine where the import of torch crashes or CUDA hangs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatrain.commands.argument_types import add_json
from megatrain.commands.doctor.finding import DoctorFinding, FindingLevel
from megatrain.commands.doctor.machine import machine_findings
from megatrain.commands.doctor.software import software_findings
from megatrain.commands.doctor.torch_report import torch_findings
from megatrain.commands.printing import print_json
from megatrain.contracts.exit_codes import ExitCode

SUMMARY = "report what this machine has and what that means for megatrain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings. The exit code is 1 when the trainer cannot run here at all."""
    findings = [*torch_findings(sys.version_info), *software_findings(), *machine_findings()]
    can_train = all(finding.level is not FindingLevel.FATAL for finding in findings)
    if args.is_json:
        print_json({"can_train": can_train, "findings": [asdict(finding) for finding in findings]})
    else:
        print("\n".join(_lines(findings, can_train)))
    return int(ExitCode.OK if can_train else ExitCode.FAILURE)


def _lines(findings: Sequence[DoctorFinding], can_train: bool) -> list[str]:
    """Return the findings for people: a mark, name and state on one line, the consequence below."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.mark}  {finding.name:<{width}}  {finding.state}")
        if finding.consequence:
            lines.append(f"    {'':<{width}}  {finding.consequence}")
    verdict = "megatrain can train here." if can_train else "megatrain cannot train here: fix the findings marked XX."
    return [*lines, "", verdict]
