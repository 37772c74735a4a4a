"""NVIDIA's packages are distinguished from others, incomplete ones and broken ones; packages are found on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.ops.optional_backends import (
    FoundBackend,
    find_apex,
    find_transformer_engine,
    import_apex,
    import_transformer_engine,
)
from tests.helpers.backend_packages import APEX, NAMES, PYPI_APEX, TRANSFORMER_ENGINE, write_packages


def without(files: dict[str, str], *paths: str) -> dict[str, str]:
    return {path: text for path, text in files.items() if path not in paths}


def test_missing_backend_is_reported(package_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(package_root)])
    apex, engine = find_apex(), find_transformer_engine()

    assert apex.directory is engine.directory is None
    assert apex.problem == "NVIDIA apex is not installed"
    assert "PyPI's apex is another project" in apex.hint
    assert engine.problem == "Transformer Engine is not installed"
    assert engine.hint == "pip install --no-build-isolation 'transformer_engine[pytorch]'"


def test_installed_backend_is_found_without_an_import(package_root: Path) -> None:
    write_packages(package_root, APEX | TRANSFORMER_ENGINE)

    assert find_apex() == FoundBackend(package_root / "apex", "0.1")
    assert find_transformer_engine() == FoundBackend(package_root / "transformer_engine", "2.9.0")
    assert not set(NAMES) & set(sys.modules)
    assert import_apex().__name__ == "apex.normalization.fused_layer_norm"
    assert import_transformer_engine().recipe.__name__ == "transformer_engine.common.recipe"


@pytest.mark.parametrize("files", [PYPI_APEX, {"apex/README": "a clone in the working directory"}])
def test_another_package_named_apex_is_called_that(package_root: Path, files: dict[str, str]) -> None:
    write_packages(package_root, files | {"fused_layer_norm_cuda.py": ""})
    found = find_apex()

    assert found.version == ""
    assert found.problem == (
        f"the apex at {package_root / 'apex'} is not NVIDIA's: it has no normalization/fused_layer_norm.py"
    )
    assert found.hint.startswith("pip uninstall apex, then build it from")


def test_apex_without_kernels_is_reported(package_root: Path) -> None:
    write_packages(package_root, without(APEX, "fused_layer_norm_cuda.py"))
    found = find_apex()

    assert found.version == "0.1"
    assert found.problem.endswith("was built without its CUDA extensions: there is no fused_layer_norm_cuda")
    assert "APEX_CUDA_EXT=1" in found.hint


def test_transformer_engine_without_pytorch_is_reported(package_root: Path) -> None:
    write_packages(package_root, without(TRANSFORMER_ENGINE, "transformer_engine/pytorch/__init__.py"))

    assert find_transformer_engine().problem.endswith("was installed without its PyTorch module")


def test_transformer_engine_that_cannot_work_is_reported(package_root: Path) -> None:
    compiled = next(path for path in TRANSFORMER_ENGINE if path.endswith(".so"))
    metadata = next(path for path in TRANSFORMER_ENGINE if path.endswith("METADATA"))
    for files, problem in (
        (without(TRANSFORMER_ENGINE, compiled), "has no compiled transformer_engine_torch"),
        ({metadata: TRANSFORMER_ENGINE[metadata].replace("2.9.0", "2.8.1"), compiled: ""}, "2.8.1 is too old"),
    ):
        write_packages(package_root, files)
        found = find_transformer_engine()
        assert problem in found.problem
        assert found.hint == "pip install --no-build-isolation 'transformer_engine[pytorch]'"


def test_apex_without_metadata_has_an_unknown_version(package_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packages(package_root, without(APEX, "apex-0.1.dist-info/METADATA"))
    monkeypatch.setattr(sys, "path", [str(package_root)])

    assert find_apex() == FoundBackend(package_root / "apex", "of unknown version")


@pytest.mark.parametrize(
    ("load", "files", "message"),
    [
        (
            import_apex,
            APEX | {"fused_layer_norm_cuda.py": "raise ImportError('undefined symbol: _ZN2at')\n"},
            "fused_layer_norm_cuda does not load: ImportError: undefined symbol: _ZN2at",
        ),
        (
            import_apex,
            APEX | {"apex/__init__.py": "raise RuntimeError('wants another torch')\n"},
            r"apex\.normalization\.fused_layer_norm does not load: RuntimeError: wants another torch",
        ),
        (
            import_transformer_engine,
            TRANSFORMER_ENGINE
            | {"transformer_engine/pytorch/__init__.py": "raise FileNotFoundError('no shared object')"},
            r"transformer_engine\.pytorch does not load: FileNotFoundError: no shared object",
        ),
        (
            import_transformer_engine,
            TRANSFORMER_ENGINE | {"transformer_engine/pytorch/__init__.py": "fp8_autocast = None\n"},
            r"transformer_engine\.pytorch has no autocast, so it is too old; install Transformer Engine >= 2\.9",
        ),
    ],
    ids=["compiled part", "package", "shared object", "too old"],
)
def test_broken_backend_reports_its_error(
    package_root: Path, load: Callable[[], object], files: dict[str, str], message: str
) -> None:
    write_packages(package_root, files)

    with pytest.raises(ImportError, match=message):
        load()
