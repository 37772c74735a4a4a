"""`megatrain sample CHECKPOINT --prompt TEXT`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SUMMARY = "sample text from a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT",
                        help="a checkpoint, or a run directory: then its newest one")  # fmt: skip
    parser.add_argument("--prompt", default="", help="text to continue (default: start a document)")
    parser.add_argument("--max-tokens", type=_count, default=100, metavar="N", help="stop after N tokens (default 100)")
    parser.add_argument("--temperature", type=_non_negative, default=0.8, metavar="T",
                        help="0: always the likeliest token (default 0.8)")  # fmt: skip
    parser.add_argument(
        "--top-k", type=_count, default=0, metavar="K", help="choose among the K likeliest (default: all)"
    )
    parser.add_argument("--top-p", type=_probability, default=1.0, metavar="P",
                        help="choose among the likeliest that together have probability P (default 1)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import torch

    from megatrain.contracts.errors import ConfigError
    from megatrain.generation import Sampling, find_checkpoint, generate, load_model

    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise ConfigError(["--device cuda: torch sees no CUDA device here; use --device cpu"])
    checkpoint = find_checkpoint(args.checkpoint)
    loaded = load_model(checkpoint, torch.device("cuda" if has_cuda and args.device != "cpu" else "cpu"))
    sampling = Sampling(args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    tokens = list(generate(loaded, loaded.tokenizer.encode(args.prompt), sampling))
    text = loaded.tokenizer.decode(tokens)
    if args.json:
        print(json.dumps({"schema_version": 1, "checkpoint": str(checkpoint), "step": loaded.step,
                          "prompt": args.prompt, "text": text, "tokens": tokens}))  # fmt: skip
    else:
        print(args.prompt + text)
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value
