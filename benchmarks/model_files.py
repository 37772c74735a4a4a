"""Import and export of a Hugging Face model of 3 billion parameters in 8 files, beside plain copies of its bytes.

The model is made up: a Llama with random weights in bf16. The commands are `megatrain ckpt import-hf` and `export-hf`.
The sides take turns, and each reads its files from the disk. Run alone on the machine, with 45 GB free:
python -m benchmarks model_files [--write] [--storage DIRECTORY]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_least, at_most
from benchmarks.result import Result

NUM_SHARDS = 8
ROUNDS = 3
GIB = 2**30
RATE_BAR = 0.5
SHAPE = {"hidden_size": 2560, "intermediate_size": 8960, "num_hidden_layers": 32, "num_attention_heads": 20,
         "num_key_value_heads": 4, "vocab_size": 50304, "tie_word_embeddings": False}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run of a side: its duration, and the peak resident memory of its process."""

    seconds: float
    peak_bytes: int


def run(storage: str) -> Result:
    """Make the model, then import, export and copy it."""
    with tempfile.TemporaryDirectory(dir=storage or None, prefix="model-files-") as name:
        directory = Path(name)
        source, checkpoint, exported = (directory / one for one in ("source", "checkpoint", "exported"))
        subprocess.run([sys.executable, "-c", _MAKE, str(source)], check=True)
        largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
        _command("import-hf", source, checkpoint)  # the export's source
        sides: dict[str, Callable[[Path], TimedRun]] = {
            "import-hf": lambda output: _command("import-hf", source, output),
            "copy of the model's files": lambda output: _copy(source, output),
            "export-hf": lambda output: _command(
                "export-hf", checkpoint, output, "--dtype", "bf16", "--max-shard-size", str(largest)
            ),
        }
        runs: dict[str, list[TimedRun]] = {side: [] for side in sides}
        for turn in range(ROUNDS):
            for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                _leave_page_cache(directory)
                runs[side].append(sides[side](exported))
                shutil.rmtree(exported)
        num_bytes = {"model": _num_bytes(source), "checkpoint": _num_bytes(checkpoint)}
    moved = {
        "import-hf": num_bytes["model"] + num_bytes["checkpoint"],
        "export-hf": num_bytes["model"] + num_bytes["checkpoint"],
        "copy of the model's files": 2 * num_bytes["model"],
    }
    rows = _rows(runs, moved)
    return Result(
        name="model-files",
        title=f"Import and export of a model in {NUM_SHARDS} files of {largest / GIB:.2f} GiB or less",
        command="python -m benchmarks model_files --write",
        rows=rows,
        notes=[
            f"medians of {ROUNDS} runs a side, in turn; files leave the page cache before each run",
            "a side is done when its files are on the disk",
            "GB moved: bytes read and written; a checkpoint holds fp32, so it has twice the model's bytes",
            "ratio: GB moved a second / those of the copy",
            "peak GiB: resident memory of the process, with the pages of files that it maps",
        ],
        settings={**SHAPE, "files": NUM_SHARDS, "storage": storage or tempfile.gettempdir()},
        bars=_bars(rows, largest),
    )


def _rows(runs: Mapping[str, list[TimedRun]], moved: Mapping[str, int]) -> list[dict[str, Any]]:
    rates = {side: moved[side] / statistics.median(one.seconds for one in all_runs) for side, all_runs in runs.items()}
    (copy,) = (rate for side, rate in rates.items() if side.startswith("copy"))
    return [
        {
            "side": side,
            "GB moved": moved[side] / 1e9,
            "s": statistics.median(one.seconds for one in all_runs),
            "least s": min(one.seconds for one in all_runs),
            "most s": max(one.seconds for one in all_runs),
            "GB/s": rates[side] / 1e9,
            "ratio": rates[side] / copy,
            "peak GiB": max(one.peak_bytes for one in all_runs) / GIB,
        }
        for side, all_runs in runs.items()
    ]


def _bars(rows: list[dict[str, Any]], largest: int) -> list[Bar]:
    commands = [row for row in rows if row["side"].endswith("-hf")]
    return [
        *(at_least(f"{row['side']}: rate / that of the copy", row["ratio"], RATE_BAR) for row in commands),
        *(
            at_most(f"{row['side']}: peak GiB (twice the largest file + 1)", row["peak GiB"], 2 * largest / GIB + 1)
            for row in commands
        ),
    ]


def _command(verb: str, source: Path, output: Path, *options: str) -> TimedRun:
    arguments = [sys.executable, "-m", "megatrain", "ckpt", verb, str(source), "--output", str(output), *options]
    began = time.perf_counter()
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, (arguments, child.returncode)
    return TimedRun(time.perf_counter() - began, usage.ru_maxrss * 1024)


def _copy(source: Path, output: Path) -> TimedRun:
    began = time.perf_counter()
    output.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, output / path.name)
        _sync(output / path.name)
    return TimedRun(time.perf_counter() - began, 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _leave_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # only pages that are on the disk leave the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


_MAKE = f"""
import json, pathlib, sys
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

directory = pathlib.Path(sys.argv[1])
directory.mkdir()
config = LlamaConfig(**{json.loads(json.dumps(SHAPE))!r}, dtype="bfloat16", architectures=["LlamaForCausalLM"])
config.save_pretrained(directory)
with torch.device("meta"):
    shapes = {{name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}}
most = sum(2 * shape.numel() for shape in shapes.values()) / {NUM_SHARDS}
shards, begun = [[]], 0
for name, shape in shapes.items():
    if begun >= most and len(shards) < {NUM_SHARDS}:
        shards.append([])
        begun = 0
    shards[-1].append(name)
    begun += 2 * shape.numel()
file_of, generator = {{}}, torch.Generator().manual_seed(0)
for number, names in enumerate(shards, 1):
    file = f"model-{{number:05d}}-of-{{len(shards):05d}}.safetensors"
    tensors = {{name: torch.randn(shapes[name], generator=generator).mul_(0.02).bfloat16() for name in names}}
    save_file(tensors, directory / file, metadata={{"format": "pt"}})
    file_of.update(dict.fromkeys(names, file))
index = {{"metadata": {{"total_size": round(most * {NUM_SHARDS})}}, "weight_map": file_of}}
(directory / "model.safetensors.index.json").write_text(json.dumps(index))
"""
