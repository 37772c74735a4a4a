"""Finds NVIDIA apex and Transformer Engine without importing them, and imports those that the configuration selects.

PyPI has another project under the name apex, so NVIDIA's apex is recognized by its files. This module does not import
torch, so that `megatrain doctor` can run where torch is not installed.
Sources: apex 6424da3 (apex/normalization, csrc/layer_norm_cuda.cpp); Transformer Engine 2.9 to 2.20 (pytorch/module).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

APEX_INSTALL = (
    "build it from a clone of github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
    "--no-build-isolation . (PyPI's apex is another project; NVIDIA's PyTorch containers have the right one)"
)
TRANSFORMER_ENGINE_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]'"

APEX_EXTENSION = "fused_layer_norm_cuda"
TRANSFORMER_ENGINE_EXTENSION = "transformer_engine_torch"
OLDEST_TRANSFORMER_ENGINE = (2, 9)


@dataclass(frozen=True, slots=True)
class TransformerEngine:
    """The two modules of Transformer Engine that are used."""

    pytorch: ModuleType
    recipe: ModuleType


@dataclass(frozen=True, slots=True)
class FoundBackend:
    """The package that is installed under the name of a backend."""

    directory: Path | None
    """None if nothing is installed under that name."""
    version: str
    """Empty if the package is not that backend."""
    problem: str = ""
    """Why the package cannot be used; empty if its files show no reason. It is not imported."""
    hint: str = ""


def find_apex() -> FoundBackend:
    """Find NVIDIA apex with its compiled norms."""
    directory = _directory("apex")
    if directory is None:
        return FoundBackend(None, "", "NVIDIA apex is not installed", APEX_INSTALL)
    if not (directory / "normalization" / "fused_layer_norm.py").is_file():
        problem = f"the apex at {directory} is not NVIDIA's: it has no normalization/fused_layer_norm.py"
        return FoundBackend(directory, "", problem, f"pip uninstall apex, then {APEX_INSTALL}")
    version = _version("apex")
    if importlib.util.find_spec(APEX_EXTENSION) is None:
        problem = f"NVIDIA apex at {directory} was built without its CUDA extensions: there is no {APEX_EXTENSION}"
        return FoundBackend(directory, version, problem, APEX_INSTALL)
    return FoundBackend(directory, version)


def find_transformer_engine() -> FoundBackend:
    """Find Transformer Engine with its PyTorch module."""
    directory = _directory("transformer_engine")
    if directory is None:
        return FoundBackend(None, "", "Transformer Engine is not installed", TRANSFORMER_ENGINE_INSTALL)
    version = _version("transformer_engine")
    problem = ""
    if not (directory / "pytorch" / "__init__.py").is_file():
        problem = f"the Transformer Engine at {directory} was installed without its PyTorch module"
    elif not _has_compiled_part(directory):
        problem = f"the Transformer Engine at {directory} has no compiled {TRANSFORMER_ENGINE_EXTENSION}"
    elif _is_older(version, OLDEST_TRANSFORMER_ENGINE):
        problem = f"Transformer Engine {version} is too old: 2.9 is the first with autocast"
    return FoundBackend(directory, version, problem, TRANSFORMER_ENGINE_INSTALL if problem else "")


def import_apex() -> ModuleType:
    """Return apex.normalization.fused_layer_norm.

    Raises: ImportError when this module or its compiled part cannot be imported.
    """
    module = _imported("apex.normalization.fused_layer_norm")
    _imported(APEX_EXTENSION)  # apex loads it only at the first norm; an error must appear before training
    return module


def import_transformer_engine() -> TransformerEngine:
    """Return transformer_engine.pytorch and transformer_engine.common.recipe.

    Raises: ImportError when one of them cannot be imported, or Transformer Engine is older than 2.9.
    """
    module = _imported("transformer_engine.pytorch")
    if not hasattr(module, "autocast"):
        raise ImportError(
            "transformer_engine.pytorch has no autocast, so it is too old; install Transformer Engine >= 2.9"
        )
    return TransformerEngine(module, _imported("transformer_engine.common.recipe"))


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
        # both packages search for libraries, versions and devices on import, and raise various errors if one is missing
        raise ImportError(f"{name} does not load: {type(error).__name__}: {error}") from error


def _directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _has_compiled_part(directory: Path) -> bool:
    """Return whether there is a library in one of the places where Transformer Engine looks for it."""
    roots = {directory.parent, Path(sysconfig.get_paths()["purelib"])}
    places = [root / place for root in roots for place in ("", "transformer_engine", "transformer_engine/wheel_lib")]
    return any(found for place in places for found in place.glob(f"{TRANSFORMER_ENGINE_EXTENSION}*.so"))


def _is_older(version: str, oldest: tuple[int, int]) -> bool:
    """Return whether `version` is older; False if it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < oldest


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
