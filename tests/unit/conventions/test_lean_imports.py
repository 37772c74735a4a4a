"""Layers 0 to 2, the command line and the help of every verb load no torch; most of them no numpy either."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatrain.cli import BUILT_IN_VERBS
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

HEAVY_MODULES = [
    "torch", "torch.distributed.checkpoint", "torch._dynamo", "sympy", "numpy", "pyarrow", "tokenizers", "safetensors",
    "sentencepiece", "transformers", "tensorboard", "wandb",
]  # fmt: skip

REPORT = f"""
import json, sys
print(json.dumps([name for name in {HEAVY_MODULES} if name in sys.modules]))
"""


def heavy_modules_after(statements: str) -> list[str]:
    """Return the heavy modules that a fresh interpreter has loaded after `statements`."""
    command = [sys.executable, "-c", statements + REPORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True)
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize(
    "module",
    [
        "megatrain",
        "megatrain.arena.plans",
        "megatrain.arena.capacity",
        "megatrain.arena.sealed",
        "megatrain.checkpoint.activity",
        "megatrain.checkpoint_format.data_file",
        "megatrain.checkpoint.difference",
        "megatrain.checkpoint.find",
        "megatrain.checkpoint_format.index_file",
        "megatrain.checkpoint.survey",
        "megatrain.checkpoint_format.url_location",
        "megatrain.checkpoint.verification",
        "megatrain.cli",
        "megatrain.commands.ckpt",
        "megatrain.config",
        "megatrain.contracts",
        "megatrain.contracts.black_box.reader",
        "megatrain.checkpoint_format.checkpoint_files",
        "megatrain.checkpoint_format.lineage",
        "megatrain.checkpoint_format.retention",
        "megatrain.formatting.quantities",
        "megatrain.schedule",
    ],
)
def test_module_loads_the_standard_library_only(module: str) -> None:
    assert heavy_modules_after(f"import {module}") == []


def test_replay_loads_numpy_but_no_torch() -> None:
    assert set(heavy_modules_after("import megatrain.replay")) <= {"numpy"}


def test_a_rank_starts_with_torch_and_numpy_only() -> None:
    assert heavy_modules_after("import megatrain.training.worker") == ["torch", "numpy"]


def test_help_loads_nothing_heavy() -> None:
    assert heavy_modules_after("from megatrain.cli import main; assert main(['--help']) == 0") == []


@pytest.mark.parametrize("verb", BUILT_IN_VERBS)
def test_help_of_a_verb_loads_no_torch(verb: str) -> None:
    loaded = heavy_modules_after(f"from megatrain.cli import main; assert main([{verb!r}, '--help']) == 0")
    assert "torch" not in loaded


def test_programs_around_a_run_load_no_torch() -> None:
    statements = (
        "import megatrain\n"
        "class Mine(megatrain.Callback): pass\n"
        "trainer = megatrain.Trainer('configs/demo.toml', callbacks=[Mine()])\n"
        "assert megatrain.read_run('tests/golden/dashboard-sample').metrics().num_rows\n"
    )
    assert set(heavy_modules_after(statements)) == {"numpy", "pyarrow"}
