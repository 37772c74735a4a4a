"""A configuration small enough for launches in tests, and the flags of a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain_launcher.launch.flags import LaunchFlags

_TOML = """
[job]
name = "small"
run_directory = "{run}"

[model]
vocab_size = 256
seq_len = 16
hidden_size = 16
num_layers = 2
num_heads = 2

[batch]
global_batch_size = 12

[train]
steps = 4
precision = "fp32"

[optimizer]
lr = 0.001

[data]
train = "tokens"

[runtime]
device = "cpu"

[telemetry]
black_box_directory = "{boxes}"

[recovery]
join_timeout_s = 20.0
"""


def write_config(directory: Path) -> Path:
    """Write a configuration whose run and black boxes are below `directory`."""
    path = directory / "small.toml"
    boxes = directory / "boxes"
    boxes.mkdir(exist_ok=True)
    path.write_text(_TOML.format(run=directory / "run", boxes=boxes))
    return path


def small_flags(directory: Path, **changes: Any) -> LaunchFlags:
    return LaunchFlags(config=write_config(directory), **changes)
