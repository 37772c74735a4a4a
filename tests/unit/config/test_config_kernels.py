"""Rules of [kernels]: what may be named, and where."""

from __future__ import annotations

import pytest

CASES = {
    "apex": (["--kernels.norm=apex", "--runtime.device=cuda"], None),
    "apex with RMSNorm in fp64": (
        ["--kernels.norm=apex", "--model.norm=rmsnorm", "--train.precision=fp64"],
        None,
    ),
    "apex on processors": (
        ["--kernels.norm=apex", "--runtime.device=cpu"],
        (
            'kernels.norm="apex" runs on GPUs only, and runtime.device="cpu"; use norm="megatrain" or another device '
            "(--kernels.norm on the command line)"
        ),
    ),
    "apex with LayerNorm in fp64": (
        ["--kernels.norm=apex", "--model.norm=layernorm", "--train.precision=fp64"],
        (
            'kernels.norm="apex" has no backward of model.norm="layernorm" for train.precision="fp64"; use '
            'kernels.norm="megatrain" or precision="fp32" (--kernels.norm on the command line)'
        ),
    ),
}


@pytest.mark.parametrize(("overrides", "expected"), CASES.values(), ids=CASES.keys())
def test_rule(problems_of, overrides: list[str], expected: str | None) -> None:
    assert problems_of(*overrides) == (() if expected is None else (expected,))
