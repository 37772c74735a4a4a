"""A worker reports the kernels that its GPU will run, and refuses configurations without kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.ops.extension import Extension
from megatrain.training.kernel_readiness import kernel_note, processor_notes, refuse_gpu_backends, whole_sequence_notes
from tests.helpers.backend_packages import APEX, NAMES, PYPI_APEX, TRANSFORMER_ENGINE, write_packages
from tests.helpers.single_rank import make_config

BUILT = Extension(("8.0", "9.0a"), "")
MISSING = Extension((), "megatrain._C was not built when megatrain was installed")
HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)


def test_present_and_missing_kernels_are_reported() -> None:
    assert kernel_note(make_config(), HOPPER, BUILT) == "compiled kernels for 8.0, 9.0a"
    assert kernel_note(make_config(), HOPPER, MISSING) == (
        "no compiled kernels (megatrain._C was not built when megatrain was installed): megatrain's operations run in "
        "plain PyTorch form, which is slower"
    )


@pytest.mark.parametrize(
    ("tables", "capability", "extension", "problem"),
    [
        ({"kernels": {"strict": True}}, HOPPER, MISSING, r"kernels\.strict=true and there are no compiled kernels: .*"),
        (
            {"kernels": {"cuda_graphs": True}},
            HOPPER,
            MISSING,
            r"kernels\.cuda_graphs=true and there are no compiled kernels \(megatrain\._C was not .*cuda_graphs=false",
        ),
        (
            {"fp8": {"recipe": "rowwise"}},
            HOPPER,
            MISSING,
            r'fp8\.recipe="rowwise" and there are no compiled kernels: megatrain\._C was .*; use recipe="none"',
        ),
        (
            {"kernels": {"attention": "flash"}},
            HOPPER,
            BUILT,
            r'kernels\.attention="flash" does not support this model: not flash: it needs bf16 or fp16, not',
        ),
        (
            {"kernels": {"strict": True}},
            HOPPER,
            BUILT,
            r"kernels\.strict=true, and attention would write out all S \* S scores: not cudnn: it needs bf16 or fp16",
        ),
        ({}, (10, 0), BUILT, r"built for compute capability 8\.0, 9\.0a; this GPU has 10\.0: install megatrain again"),
        ({"fp8": {"recipe": "tensorwise"}}, AMPERE, BUILT, r'"tensorwise" needs a GPU of compute capability 8\.9'),
        ({"fp8": {"recipe": "rowwise"}}, ADA, BUILT, r'"rowwise" needs a GPU of compute capability 9\.0, and this one'),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    tables: dict[str, Any], capability: tuple[int, int], extension: Extension, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        kernel_note(make_config(**tables), capability, extension)


def test_strict_accepts_a_gpu_with_all_kernels() -> None:
    config = make_config(
        kernels={"strict": True}, fp8={"recipe": "tensorwise"}, train={"precision": "bf16"}, model={"num_heads": 2}
    )

    assert kernel_note(config, ADA, BUILT).startswith("compiled kernels")


def test_options_without_effect_on_a_cpu_are_reported() -> None:
    config = make_config(
        kernels={"strict": True, "attention": "flash", "cuda_graphs": True}, parallel={"offload_layers": 1}
    )

    reported = processor_notes(config)
    for key in ("kernels.strict", "kernels.attention", "kernels.cuda_graphs", "parallel.offload_layers"):
        assert any(note.startswith(key) for note in reported), key


BOTH = {
    "kernels": {"norm": "apex"},
    "fp8": {"recipe": "tensorwise", "backend": "transformer_engine"},
}


def test_named_backends_are_imported_and_reported(package_root: Path) -> None:
    write_packages(package_root, APEX | TRANSFORMER_ENGINE)

    assert kernel_note(make_config(), HOPPER, BUILT) == "compiled kernels for 8.0, 9.0a"
    assert not set(NAMES) & set(sys.modules)
    assert kernel_note(make_config(**BOTH), HOPPER, BUILT) == (
        "compiled kernels for 8.0, 9.0a; kernels.norm by apex 0.1; fp8.backend by transformer_engine 2.9.0"
    )
    assert set(NAMES) <= set(sys.modules)


def test_backends_that_are_not_there_are_refused_together(package_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(package_root)])
    with pytest.raises(ConfigError) as caught:
        kernel_note(make_config(**BOTH), HOPPER, BUILT)

    apex, engine = caught.value.problems
    assert apex.startswith('kernels.norm="apex": NVIDIA apex is not installed: build it from ')
    assert apex.endswith('; or use norm="megatrain"')
    assert engine == (
        'fp8.backend="transformer_engine": Transformer Engine is not installed: pip install --no-build-isolation '
        "'transformer_engine[pytorch]'; or use backend=\"megatrain\""
    )


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (PYPI_APEX, r'kernels\.norm="apex": the apex at .* is not NVIDIA\'s: .*: pip uninstall apex, then build it'),
        (
            APEX | {"fused_layer_norm_cuda.py": "import no_such_library\n"},
            r'kernels\.norm="apex": fused_layer_norm_cuda does not load: .* \'no_such_library\'; or use norm="mega',
        ),
    ],
    ids=["PyPI's", "broken"],
)
def test_the_wrong_backend_is_refused(package_root: Path, files: dict[str, str], problem: str) -> None:
    write_packages(package_root, files)

    with pytest.raises(ConfigError, match=problem):
        kernel_note(make_config(kernels={"norm": "apex"}), HOPPER, BUILT)


def test_on_processors_named_backends_are_refused(package_root: Path) -> None:
    write_packages(package_root, APEX | TRANSFORMER_ENGINE)
    refuse_gpu_backends(make_config())
    with pytest.raises(ConfigError) as caught:
        refuse_gpu_backends(make_config(**BOTH))

    assert caught.value.problems == (
        (
            'kernels.norm="apex" runs on GPUs only, and torch sees none here; use norm="megatrain", or see '
            "`megatrain doctor`"
        ),
        (
            'fp8.backend="transformer_engine" runs on GPUs only, and torch sees none here; use backend="megatrain", or '
            "see `megatrain doctor`"
        ),
    )


def test_cuda_graphs_are_reported() -> None:
    config = make_config(kernels={"cuda_graphs": True})

    assert kernel_note(config, HOPPER, BUILT) == (
        "compiled kernels for 8.0, 9.0a; micro-batches are replayed from CUDA graphs after 2 steps"
    )
    assert processor_notes(config) == ["kernels.cuda_graphs=true has no effect on CPUs"]
    assert processor_notes(make_config()) == []


def test_layers_that_exchange_all_rows_at_once_are_reported() -> None:
    fp8 = {"recipe": "tensorwise", "skip_layers": [0]}
    chunks = {"tp_size": 2, "num_sequence_chunks": 4}

    (reported,) = whole_sequence_notes(make_config(fp8=fp8, parallel=chunks))
    assert reported.startswith("parallel.num_sequence_chunks=4: 1 of 2 layers exchange all rows at once")
    assert whole_sequence_notes(make_config(parallel=chunks)) == []
    assert whole_sequence_notes(make_config(fp8=fp8, parallel={"tp_size": 2})) == []
