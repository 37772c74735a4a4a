"""Layers 0 to 2, the command line and the help of every command load no torch; most of them load no numpy either."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from megatrain.cli import BUILT_IN_VERBS
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

HEAVY_MODULES = [
    "torch", "torch.distributed.checkpoint", "torch._dynamo", "sympy", "numpy", "pyarrow", "tokenizers", "safetensors",
    "sentencepiece", "transformers", "tensorboard", "wandb",
]  # fmt: skip

STANDARD_LIBRARY_ONLY = [
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
    "megatrain.checkpoint_format.removals",
    "megatrain.formatting",
    "megatrain.schedule",
]

REPORT = f"""
import json, sys
print("\\n" + json.dumps([name for name in {HEAVY_MODULES} if name in sys.modules]))
"""


def heavy_modules_after_each(statements: Sequence[str]) -> list[list[str]]:
    """Return the heavy modules that a fresh interpreter has loaded after each of the statements, one by one."""
    program = "".join(f"{each}\n{REPORT}" for each in statements)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def heavy_modules_after(statements: str) -> list[str]:
    """Return the heavy modules that a fresh interpreter has loaded after `statements`."""
    return heavy_modules_after_each([statements])[0]


def test_limit_of_threads_is_set_before_torch_is_loaded() -> None:
    """The conftest of a directory, which loads torch, runs after the one of all tests."""
    limited = "import os; os.environ.pop('OMP_NUM_THREADS', None); import tests.conftest"
    assert "torch" not in heavy_modules_after(f"{limited}; assert os.environ['OMP_NUM_THREADS'] == '1'")


def test_modules_and_help_load_few_packages() -> None:
    """One process executes all statements, so each statement also includes the modules of those before it."""
    light = [f"import {module}" for module in STANDARD_LIBRARY_ONLY]
    light.append("from megatrain.cli import main; assert main(['--help']) == 0")
    replay = "import megatrain_diagnostics.replay"
    verbs = [f"assert main([{verb!r}, '--help']) == 0" for verb in BUILT_IN_VERBS]
    statements = [*light, replay, *verbs]

    loaded = dict(zip(statements, heavy_modules_after_each(statements), strict=True))

    assert {statement: loaded[statement] for statement in light if loaded[statement]} == {}
    assert set(loaded[replay]) <= {"numpy"}
    assert [statement for statement in verbs if "torch" in loaded[statement]] == []


@pytest.mark.slow
def test_a_rank_starts_with_torch_and_numpy_only() -> None:
    assert heavy_modules_after("import megatrain.training.worker") == ["torch", "numpy"]


def test_programs_around_a_run_load_no_torch() -> None:
    statements = (
        "import megatrain\n"
        "class Mine(megatrain.Callback): pass\n"
        "trainer = megatrain.Trainer('configs/demo.toml', callbacks=[Mine()])\n"
        "assert megatrain.read_run('tests/golden/dashboard-sample').metrics().num_rows\n"
    )
    assert set(heavy_modules_after(statements)) == {"numpy", "pyarrow"}
