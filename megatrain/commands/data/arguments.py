"""Arguments and output that several subcommands of `megatrain data` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.argument_types import utf8_text

if TYPE_CHECKING:
    from megatrain.data.meta import DataMeta
    from megatrain.data.remote_path import DataPath
    from megatrain.data.tokenizer import Tokenizer


def data_path(text: str) -> DataPath:
    """Return the path or URL of data; URLs with the cache that runs have by default. Raises: DataError."""
    # these modules load numpy
    from megatrain.config.data import DataConfig
    from megatrain.data.block_cache import CacheSettings
    from megatrain.data.remote_path import path_or_url

    return path_or_url(utf8_text(text), CacheSettings.of(DataConfig()))


def add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", type=data_path, metavar="PREFIX", help="the files' path or URL without .bin or .idx")


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer to decode with (default: the one beside the data)"
    )


def add_force(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--force", action="store_true", help=f"replace {what} that exists")


def chosen_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer that --tokenizer names, else the one beside the data. Raises: DataError."""
    from megatrain.data.dataset import tokenizer_beside
    from megatrain.data.tokenizer import load_tokenizer

    return load_tokenizer(args.tokenizer or tokenizer_beside(args.prefix))


def directory_lines(meta: DataMeta, output: Path) -> list[str]:
    """Return a summary of a new data directory."""
    lines = [
        f"{name + ':':<12}{split.documents:>9,} documents {split.tokens:>13,} tokens {split.text_bytes:>14,} bytes"
        f" ({split.text_bytes / split.tokens:.2f} bytes/token)"
        for name, split in (("train", meta.train), ("validation", meta.validation))
    ]
    lines += [f"skipped:    {count:>9,} {reason}" for reason, count in meta.skipped.items()]
    lines.append(f"unigram entropy of the held-out tokens: {meta.unigram_entropy_nats:.3f} nats/token")
    lines.append(f"data is in {output}: set data.train={output / 'train'} data.validation={output / 'validation'}")
    return lines
