"""`megatrain sample CHECKPOINT --prompt TEXT`: continue a text with a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.argument_types import add_json, real_number, seed, utf8_text, whole_number
from megatrain.commands.checkpoint_choice import add_checkpoint, add_ema, chosen_checkpoint
from megatrain.commands.printing import print_json
from megatrain.contracts.errors import DataError
from megatrain.data.pictures.picture_format import DALI, DECODERS, PictureFormat

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.config.model import ModelConfig

SUMMARY = "sample text from a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_ema(parser)
    parser.add_argument("--prompt", type=utf8_text, default="", help="text to continue (default: start a new document)")
    parser.add_argument("--picture", metavar="FILE", help="picture before the prompt: JPEG, PNG or WebP")
    parser.add_argument(
        "--decoder", choices=DECODERS, default=DALI, help=f"what decodes the picture (default {DALI}), as in training"
    )
    parser.add_argument("--max-tokens", type=whole_number(0), default=100, metavar="N",
                        help="stop after N tokens (default 100)")  # fmt: skip
    temperature = real_number("a finite number of at least 0", lambda value: 0.0 <= value < float("inf"))
    parser.add_argument("--temperature", type=temperature, default=0.8, metavar="T",
                        help="temperature; 0 always takes the likeliest token (default 0.8)")  # fmt: skip
    parser.add_argument(
        "--top-k", type=whole_number(0), default=0, metavar="K", help="choose among the K likeliest (default: all)"
    )
    probability = real_number("a number above 0 and at most 1", lambda value: 0.0 < value <= 1.0)
    parser.add_argument("--top-p", type=probability, default=1.0, metavar="P",
                        help="choose among the likeliest that together have probability P (default 1)")  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the draws (default 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Sample.

    Raises: CheckpointError or DataError that names the file; ConfigError if the device is missing; DataError for a
    picture if the model takes none, or the decoder is not installed.
    """
    checkpoint = chosen_checkpoint(args)
    from megatrain.checkpoint_format.checkpoint_files import read_manifest
    from megatrain.conversion.software import job_config
    from megatrain.formatting import printable
    from megatrain.inference.generation import Sampling
    from megatrain.inference.loaded_model import choose_device, load_checkpoint

    loaded = load_checkpoint(checkpoint, choose_device(args.device), kind=args.kind)
    sampling = Sampling(args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    patches = None
    if args.picture is not None:
        max_pixels = job_config(read_manifest(checkpoint), checkpoint).pictures.max_pixels
        patches = _patches(args.picture, args.decoder, loaded.config, max_pixels)
    tokens = list(loaded.tokens_after(loaded.tokenizer.encode(args.prompt), sampling, patches))
    text = loaded.tokenizer.decode(tokens)
    if args.is_json:
        print_json({"checkpoint": str(checkpoint), "step": loaded.step, "prompt": args.prompt, "text": text,
                    "tokens": tokens})  # fmt: skip
    else:
        # escape control characters that a model generates: a terminal would act on them
        print("\t".join(printable(part) for part in (args.prompt + text).split("\t")))
    return 0


def _patches(path: str, decoder: str, model: ModelConfig, max_pixels: int) -> Tensor:
    """Return the patches of the picture in a file. max_pixels: pictures.max_pixels of the run. Raises: DataError."""
    import torch

    from megatrain.data.pictures.decoders import make_decoder
    from megatrain.data.pictures.picture_file import patches_of_file

    if not model.has_pictures:
        raise DataError(f"--picture {path}: the model has no pictures (model.picture_size=0); leave it out")
    picture_format = PictureFormat(model.picture_size, model.patch_size, max_pixels)
    return torch.from_numpy(patches_of_file(Path(path), make_decoder(decoder), picture_format))
