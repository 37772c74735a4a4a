"""Lower layers, commands and their help load no torch, and no module imports itself through others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from megatrain.cli import BUILT_IN_VERBS
from tests.helpers.source_tree import ROOT, imported_modules, python_files
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
    "megatrain.config.load",
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


PACKAGES = {
    "megatrain": ROOT / "megatrain",
    "megatrain_job": ROOT / "launcher" / "megatrain_job",
    "megatrain_launcher": ROOT / "launcher" / "megatrain_launcher",
    "megatrain_diagnostics": ROOT / "diagnostics" / "megatrain_diagnostics",
    "megatrain_dashboard": ROOT / "diagnostics" / "megatrain_dashboard",
}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def a_circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the modules of a circle, empty where there is none. `imports`: by module, what it imports, in full."""
    graph = {
        module: {name if name in imports else name.rpartition(".")[0] for name in names} & imports.keys() - {module}
        for module, names in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    root = PACKAGES[package]
    files = python_files(root.relative_to(ROOT).as_posix())
    found = a_circle({module_name(path, root): [name for name, _ in imported_modules(path)] for path in files})

    assert not found, " <- ".join(found)


def test_a_circle_is_found() -> None:
    assert a_circle({"a": ["b.x"], "b": ["json"], "c": ["a"]}) == []
    assert set(a_circle({"a": ["b.x"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}
