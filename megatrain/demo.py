"""`make demo`: from raw text to a sampled sentence, through every axis of parallelism, on 8 CPU processes.

The program runs and prints the commands that a user would: build data, launch the training, sample. Then it compares
the loss on held-out files with the entropy of their token frequencies: the loss of a model that uses no context.
With `--vision`, it trains a model with pictures instead, and lets it answer about pictures that it has not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.cli import run_and_report
from megatrain.config.load import load_config
from megatrain.contracts.errors import ConfigError
from megatrain.data.corpus import open_corpus
from megatrain.data.meta import META_NAME, DataMeta, read_meta
from megatrain.demo_vision import show_answers, vision_arguments
from megatrain.formatting import names_text
from megatrain.run_files.run_directory import RunDirectory

NUM_PROCESSES = 8
MARGIN_NATS = 0.7
"""The final loss must be this far below the unigram entropy. A model of token frequencies alone has a margin of 0."""
PROMPT = "def "


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0 when the loss is below that of token frequencies by MARGIN_NATS.

    With --vision: 0 when the answers are better than chance by the margin of demo_vision.
    """
    args = _parsed(argv)
    started = time.monotonic()
    load_config(args.config)
    run = RunDirectory(args.output / "run")
    remove_earlier_run(run)
    if args.vision:
        _call("train", vision_arguments(args.config, run, args.overrides))
        checkpoint = _newest_checkpoint(run)
        return 1 if checkpoint is None else show_answers(checkpoint, time.monotonic() - started)
    meta = build_data(args)
    _call("train", launch_arguments(args, run, meta))
    checkpoint = _newest_checkpoint(run)
    if checkpoint is None:
        return 1
    _call("sample", ["megatrain", "sample", str(checkpoint), f"--prompt={PROMPT}", "--max-tokens=80", "--seed=1"])
    evaluation = _last_evaluation(run.metrics / "metrics.jsonl")
    margin = meta.unigram_entropy_nats - evaluation["loss"]
    has_learned = margin >= MARGIN_NATS
    print(_summary(args.output, run, checkpoint, meta, evaluation, time.monotonic() - started))
    if not has_learned:
        print(
            f"demo: the loss is {margin:.3f} nats below the unigram entropy, expected at least {MARGIN_NATS}; more "
            "steps (-- --train.steps=...) or more text would help",
            file=sys.stderr,
        )
    return 0 if has_learned else 1


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; --vision has another configuration, and no text to build."""
    parser = demo_parser("python -m megatrain.demo", "train a small GPT on 8 CPU processes")
    text = "train on drawn pictures instead, and answer about unseen ones"
    parser.add_argument("--vision", action="store_true", help=text)
    args = parser.parse_args(argv)
    if not args.vision:
        return args
    for name in ("input", "vocab_size"):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} has no effect with --vision, which draws its data; leave it out")
    parser.set_defaults(output=Path("runs/demo-vision"), config=Path("configs/demo_vision.toml"))
    return parser.parse_args(argv)


def _newest_checkpoint(run: RunDirectory) -> Path | None:
    """Return the newest checkpoint. If there is none, report that and return None."""
    found = candidates(LocalLocation(run.checkpoints))
    if not found:
        print(f"demo: training ended without a checkpoint in {run.checkpoints}", file=sys.stderr)
        return None
    return Path(str(found[0].location))


def launch_arguments(args: argparse.Namespace, run: RunDirectory, meta: DataMeta) -> list[str]:
    """Return the command that trains on the token files of `meta`."""
    return [
        *("megatrain", "launch", "--standalone", f"--nproc-per-node={NUM_PROCESSES}", str(args.config)),
        f"--job.run_directory={run.root}",
        f"--model.vocab_size={meta.vocab_size}",
        f"--data.train={args.output / 'data' / 'train'}",
        f"--data.validation={args.output / 'data' / 'validation'}",
        f"--data.tokenizer={args.output / 'data' / 'tokenizer.json'}",
        *args.overrides,
    ]


def remove_earlier_run(run: RunDirectory) -> None:
    """Remove the run directory of an earlier demo.

    Raises: ConfigError when the directory holds files that no run writes.
    """
    if not run.root.exists():
        return
    foreign = sorted(entry.name for entry in run.root.iterdir() if not run.owns(entry.name))
    if foreign:
        raise ConfigError([f"{run.root} holds {names_text(foreign, 5)}, which no run writes; name another --output"])
    print(f"removing the demo's earlier run {run.root}")
    shutil.rmtree(run.root)


def demo_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a demonstration's arguments."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "--input",
        nargs="+",
        default=["python-stdlib"],
        metavar="SRC",
        help=".txt, .jsonl or .parquet files, or folders of them (default: Python's own library)",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="directory of all output")
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"), metavar="FILE")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="overrides of the configuration, after --"
    )
    return parser


def build_data(args: argparse.Namespace) -> DataMeta:
    """Build the token files, unless files of the same input and vocabulary size exist."""
    directory = args.output / "data"
    meta = read_meta(directory / META_NAME) if directory.exists() else None
    is_same = meta is not None and meta.sources == tuple(args.input) and meta.vocab_size == args.vocab_size
    if meta is not None and is_same and not has_changed_since(args.input, directory / META_NAME):
        print(f"using the token files of an earlier demo in {directory}")
        return meta
    command = ["megatrain", "data", "build", "--input", *args.input, "--output", str(directory),
               f"--vocab-size={args.vocab_size}", "--validation=0.01"]  # fmt: skip
    _call("build data", [*command, "--force"] if directory.exists() else command)
    built = read_meta(directory / META_NAME)
    assert built is not None
    return built


def has_changed_since(inputs: Sequence[str], built: Path) -> bool:
    """Return whether a file of the corpus, or its directory, is newer than `built`; true also for files at URLs.

    A newer directory shows that a file was added or removed.
    """
    paths = [Path(str(found.file)) for found in open_corpus(inputs).files]
    if not all(path.exists() for path in paths):
        return True  # files at URLs
    times = [path.stat().st_mtime for path in {*paths, *(path.parent for path in paths)}]
    return max(times) > built.stat().st_mtime


def _call(title: str, module: Sequence[str]) -> None:
    print(f"\n== {title}\n$ python -m {shlex.join(module)}", flush=True)
    # one thread per process, also in the commands that do not start workers
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run([sys.executable, "-m", *module], env=environment, check=False).returncode
    if code != 0:
        raise SystemExit(code if code > 0 else 1)


def _last_evaluation(metrics: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return next(record for record in reversed(records) if record["kind"] == "evaluation")


def _summary(
    output: Path, run: RunDirectory, checkpoint: Path, meta: DataMeta, evaluation: dict[str, Any], seconds: float
) -> str:
    loss, entropy = evaluation["loss"], meta.unigram_entropy_nats
    bytes_per_token = meta.validation.text_bytes / meta.validation.tokens
    unigram_bits = entropy / math.log(2.0) / bytes_per_token
    bits = loss / math.log(2.0) / bytes_per_token
    return "\n".join(
        [
            "",
            f"== done in {seconds:.0f} s",
            f"held-out loss      {loss:.3f} nats/token  {bits:.3f} bits/byte",
            f"unigram entropy    {entropy:.3f} nats/token  {unigram_bits:.3f} bits/byte",
            f"margin             {entropy - loss:.3f} nats/token below the unigram entropy (expected: {MARGIN_NATS})",
            f"data               {output / 'data'}",
            f"checkpoint         {checkpoint}",
            f"metrics            {run.metrics / 'metrics.jsonl'}",
            f"configuration      {run.root / 'config.toml'}",
            f"replay             .venv/bin/megatrain dashboard --replay {run.root}",
            f"try                .venv/bin/megatrain sample {run.root} --prompt 'import '",
        ]
    )


if __name__ == "__main__":
    sys.exit(run_and_report(main))
