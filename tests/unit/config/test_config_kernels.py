"""Rules of [kernels]: the allowed names, and where they apply."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

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


def test_rules_of_kernels(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)
