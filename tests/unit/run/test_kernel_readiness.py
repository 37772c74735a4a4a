"""What a worker says of the kernels that its GPU will run, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.kernel_readiness import kernel_note
from megatrain.ops.extension import Extension
from tests.helpers.lone_rank import make_config

BUILT = Extension(("8.0", "9.0a"), "")
MISSING = Extension((), "megatrain._C was not built when megatrain was installed")
HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)


def test_kernels_that_run_and_kernels_that_are_not_there() -> None:
    assert kernel_note(make_config(), HOPPER, BUILT) == "compiled kernels for 8.0, 9.0a"
    assert kernel_note(make_config(), HOPPER, MISSING) == (
        "no compiled kernels (megatrain._C was not built when megatrain was installed): every operation in its plain "
        "PyTorch form, which is slower"
    )


@pytest.mark.parametrize(
    ("tables", "capability", "extension", "problem"),
    [
        ({"kernels": {"strict": True}}, HOPPER, MISSING, r"kernels\.strict=true and there are no compiled kernels: .*"),
        ({}, (10, 0), BUILT, r"built for compute capability 8\.0, 9\.0a, this GPU has 10\.0: install megatrain again"),
        ({"fp8": {"recipe": "tensorwise"}}, AMPERE, BUILT, r'"tensorwise" needs a GPU of compute capability 8\.9'),
        ({"fp8": {"recipe": "rowwise"}}, ADA, BUILT, r'"rowwise" needs a GPU of compute capability 9\.0, this one'),
    ],
)
def test_what_cannot_run_is_refused(
    tables: dict[str, Any], capability: tuple[int, int], extension: Extension, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        kernel_note(make_config(**tables), capability, extension)


def test_strict_is_content_where_all_is_there() -> None:
    config = make_config(kernels={"strict": True}, fp8={"recipe": "tensorwise"})

    assert kernel_note(config, ADA, BUILT).startswith("compiled kernels")
