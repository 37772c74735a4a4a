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
    "host_optimizer.compiled_step": "AdamW and LAMB",
    "host_rotary.compiled_rotation": "rotation",
    "host_rms_norm.compiled_rms_norm": "RMSNorm",
    "host_swiglu.compiled_swiglu_backward": "SwiGLU's gradient",
    "square_sums.compiled_square_sum": "the gradient norm",
}
"""The functions that load the kernels, and the kernels' names."""
CHOSEN = ("host_optimizer.step_kernel", "host_swiglu.swiglu_backward_kernel")
"""The functions that may reject a compiled kernel."""
ALL = list(COMPILED.values())
STEP, SWIGLU = "AdamW and LAMB", "SwiGLU's gradient"
NO_FMA = "this processor has no fused multiply-add instructions (FMA)"


@pytest.mark.parametrize(
    ("is_built", "missing", "unlike_torch", "slow_here", "level", "state", "consequence"),
    [
        (True, [], [], [], FindingLevel.OK, "compiled, all used", ""),
        (
            True, [], [STEP], [], FindingLevel.ABSENT,
            "compiled, but not used for AdamW and LAMB: this torch rounds in another way",
            "on CPUs, more time for AdamW and LAMB, with the same results; GPUs do not use them",
        ),
        (
            True, [], [], [SWIGLU], FindingLevel.ABSENT, f"compiled, but not used for SwiGLU's gradient: {NO_FMA}",
            "more time for SwiGLU's gradient; the last bits of SwiGLU's gradient in fp32 differ; GPUs do not use them",
        ),
        (
            True, [], [STEP], [SWIGLU], FindingLevel.ABSENT,
            f"compiled, but not used for {STEP}: this torch rounds in another way; not used for {SWIGLU}: {NO_FMA}",
            "more time for AdamW and LAMB and SwiGLU's gradient",
        ),
        (
            True, ["rotation", "RMSNorm"], [], [], FindingLevel.WARNING,
            "compiled, but of another version or for another machine, without rotation and RMSNorm: build it again",
            "on CPUs, more time for rotation and RMSNorm; the last bits of RMSNorm in fp32 differ",
        ),
        (
            True, ALL, [], [], FindingLevel.WARNING,
            "compiled, but none is used: of another version or for another machine; build it again",
            "MEGATRAIN_CUDA=0 python setup.py build_ext --inplace --force",
        ),
        (
            False, ALL, [], [], FindingLevel.ABSENT,
            "not compiled: there was no C compiler when megatrain was installed",
            "; the last bits of RMSNorm, SwiGLU's gradient and the gradient norm in fp32 differ; GPUs do not use them",
        ),
    ],
)  # fmt: skip
def test_finding_names_the_host_kernels_that_are_not_used(
    is_built: bool,
    missing: list[str],
    unlike_torch: list[str],
    slow_here: list[str],
    level: FindingLevel,
    state: str,
    consequence: str,
) -> None:
    kernels = {"is_built": is_built, "missing": missing, "unlike_torch": unlike_torch, "slow_here": slow_here}
    findings = {finding.name: finding for finding in describe_torch({**REPORT, "host_kernels": kernels}, "")}

    finding = findings["host kernels"]
    assert (finding.level, finding.state) == (level, state)
    assert consequence in finding.consequence


@pytest.mark.parametrize(
    ("function", "missing", "unlike_torch", "slow_here"),
    [
        ("", [], [], []),
        *((function, [name], [], []) for function, name in COMPILED.items()),
        (CHOSEN[0], [], [STEP], []),
        (CHOSEN[1], [], [], [SWIGLU]),
    ],
)
def test_probe_names_the_host_kernels_that_are_not_used(
    monkeypatch: pytest.MonkeyPatch, function: str, missing: list[str], unlike_torch: list[str], slow_here: list[str]
) -> None:
    for one in (*COMPILED, *CHOSEN):
        found = None if one == function else print
        monkeypatch.setattr(f"megatrain.ops.{one}", lambda found=found: found)

    report = host_kernels_report()
    assert (report["missing"], report["unlike_torch"], report["slow_here"]) == (missing, unlike_torch, slow_here)
