"""Writes packages named like NVIDIA's, so that tests find and import them by the normal import system."""

from __future__ import annotations

import importlib
from pathlib import Path

APEX = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": (
        "from tests.helpers.apex_stand_in import fused_layer_norm_affine, fused_rms_norm_affine\n"
    ),
    "fused_layer_norm_cuda.py": "",
    "apex-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n",
}
PYPI_APEX = {
    "apex/__init__.py": "from apex.lib import users\n",
    "apex/lib/__init__.py": "",
    "apex-0.9.10.dev0.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n",
}
TRANSFORMER_ENGINE = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/common/__init__.py": "",
    "transformer_engine/common/recipe/__init__.py": (
        "from tests.helpers.transformer_engine_stand_in import Float8CurrentScaling\n"
    ),
    "transformer_engine/pytorch/__init__.py": (
        "from tests.helpers.transformer_engine_stand_in import Linear, autocast\n"
    ),
    "transformer_engine/wheel_lib/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so": "",
    "transformer_engine-2.9.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.9.0\n"
    ),
}
NAMES = ("apex", "fused_layer_norm_cuda", "transformer_engine")
"""The top-level names of all modules of these packages."""


def write_packages(root: Path, files: dict[str, str]) -> None:
    """Write `files`, by their paths below `root`, a directory on the import path."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    importlib.invalidate_caches()
