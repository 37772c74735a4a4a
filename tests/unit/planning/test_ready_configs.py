"""The ready-made configurations fit GPUs of 80 GiB, with the command lines in their comments."""

from __future__ import annotations

import re

import pytest

from megatrain.config import load_config
from megatrain.planning.run_plan import plan_run
from tests.helpers.source_tree import ROOT

READY = ("llama3_8b", "qwen3_8b", "gemma3_4b", "olmo2_7b")
GIB = 1 << 30
LARGEST = 75 * GIB
"""The limit for the tensors of one rank: the allocator and libraries need a part of the 80 GiB."""


def comment_of(name: str) -> str:
    """Return the comment at the top of a file as one line."""
    lines = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


def overrides_of(name: str, num_gpus: int) -> list[str]:
    """Return the overrides of the command line for this number of GPUs: those for 64, and more for fewer GPUs."""
    starts = [rf"--nnodes 8 --nproc-per-node 8 \.\.\. -m megatrain\.train configs/{name}\.toml"]
    if num_gpus != 64:
        starts.append(f"On {num_gpus} GPUs:")
    found = [re.search(rf"{start}((?: --[\w.]+=\w+)+)", comment_of(name)) for start in starts]
    return [override for one in found if one is not None for override in one[1].split()]


@pytest.mark.slow(kept=["llama3_8b-8"])
@pytest.mark.timeout(900)  # The plan of a long sequence with windows has many operations.
@pytest.mark.parametrize("num_gpus", [64, 8])
@pytest.mark.parametrize("name", READY)
def test_ready_configs_need_the_memory_they_state(name: str, num_gpus: int) -> None:
    path, overrides = ROOT / "configs" / f"{name}.toml", overrides_of(name, num_gpus)
    loaded = load_config(path, overrides, world_size=num_gpus, is_for_training=True)

    plan = plan_run(loaded.config)

    assert plan.layout.world_size == num_gpus
    needed = max(stage.memory.total for stage in plan.stages)
    assert needed < LARGEST
    stated = re.search(r"Tensors need (\d+) GiB of each of 64 GPUs and (\d+) GiB of each of 8", comment_of(name))
    assert stated is not None, comment_of(name)
    assert int(stated[1 if num_gpus == 64 else 2]) == round(needed / GIB)
    assert f"{plan.num_parameters:,} parameters" in comment_of(name)
