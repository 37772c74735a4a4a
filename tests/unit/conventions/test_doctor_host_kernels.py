"""The doctor's line about the kernels for CPUs: which are not used, why, and what differs without them."""

from __future__ import annotations

import pytest

from megatrain.commands.doctor.finding import FindingLevel
from megatrain.commands.doctor.torch_probe import host_kernels_report
from megatrain.commands.doctor.torch_report import describe_torch

REPORT = {
    "version": "2.13.0+cpu",
    "cuda_build": None,
    "is_cuda_available": False,
    "devices": [],
    "kernels": {"architectures": [], "reason": "this torch is built without CUDA"},
    "has_gloo": True,
    "has_nccl": False,
    "nccl_version": None,
}
COMPILED = {
    "host_kernels.compiled_step": "AdamW and LAMB",
    "host_rotary.compiled_rotation": "rotation",
    "host_rms_norm.compiled_rms_norm": "RMSNorm",
    "host_swiglu.compiled_swiglu_backward": "SwiGLU's gradient",
    "square_sums.compiled_square_sum": "the gradient norm",
}
"""The functions that load the kernels, and the kernels' names."""
ALL = list(COMPILED.values())


@pytest.mark.parametrize(
    ("is_built", "missing", "unlike_torch", "level", "state", "consequence"),
    [
        (True, [], [], FindingLevel.OK, "compiled, all used", ""),
        (
            True, [], ["AdamW and LAMB"], FindingLevel.ABSENT,
            "compiled, but not used for AdamW and LAMB: this torch rounds in another way",
            "on CPUs, more time for AdamW and LAMB, with the same results; GPUs do not use them",
        ),
        (
            True, ["rotation", "RMSNorm"], [], FindingLevel.WARNING,
            "compiled, but of another version or for another machine, without rotation and RMSNorm: build it again",
            "on CPUs, more time for rotation and RMSNorm; the last bits of RMSNorm in fp32 differ",
        ),
        (
            True, ALL, [], FindingLevel.WARNING,
            "compiled, but none is used: of another version or for another machine; build it again",
            "MEGATRAIN_CUDA=0 python setup.py build_ext --inplace --force",
        ),
        (
            False, ALL, [], FindingLevel.ABSENT,
            "not compiled: there was no C compiler when megatrain was installed",
            "; the last bits of RMSNorm, SwiGLU's gradient and the gradient norm in fp32 differ; GPUs do not use them",
        ),
    ],
)  # fmt: skip
def test_finding_names_the_host_kernels_that_are_not_used(
    is_built: bool, missing: list[str], unlike_torch: list[str], level: FindingLevel, state: str, consequence: str
) -> None:
    kernels = {"is_built": is_built, "missing": missing, "unlike_torch": unlike_torch}
    findings = {finding.name: finding for finding in describe_torch({**REPORT, "host_kernels": kernels}, "")}

    finding = findings["host kernels"]
    assert (finding.level, finding.state) == (level, state)
    assert consequence in finding.consequence


@pytest.mark.parametrize(
    ("function", "missing", "unlike_torch"),
    [
        ("", [], []),
        *((function, [name], []) for function, name in COMPILED.items()),
        ("host_kernels.step_kernel", [], ["AdamW and LAMB"]),
    ],
)
def test_probe_names_the_host_kernels_that_are_not_used(
    monkeypatch: pytest.MonkeyPatch, function: str, missing: list[str], unlike_torch: list[str]
) -> None:
    for one in (*COMPILED, "host_kernels.step_kernel"):
        found = None if one == function else print
        monkeypatch.setattr(f"megatrain.ops.{one}", lambda found=found: found)

    report = host_kernels_report()
    assert (report["missing"], report["unlike_torch"]) == (missing, unlike_torch)
