"""`megatrain data build`: build a directory of token files from text."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from megatrain.commands.argument_types import Verbs, add_json, real_number, seed, utf8_path, utf8_text, whole_number
from megatrain.commands.data.arguments import add_force, directory_lines
from megatrain.commands.printing import print_json
from megatrain.data.tokenizer import SMALLEST_VOCAB_SIZE
from megatrain.programs.stop_signals import orderly_end

LARGEST_VOCAB_SIZE = 10_000_000
"""Ten times the largest known vocabulary. A limit is needed because the trainer allocates the whole vocabulary."""


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "build", help="build a directory of token files, tokenizer.json and meta.json from text", allow_abbrev=False
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="SRC",
        help=".txt, .jsonl, .json, .parquet or .arrow files, also compressed (.gz, .zst, .bz2, .xz), folders of them, "
        "patterns ('docs/*.jsonl'), URLs (s3://...), or python-stdlib (this Python's own library)",
    )
    parser.add_argument("--output", type=utf8_path, required=True, metavar="DIR", help="the directory to create")
    parser.add_argument(
        "--vocab-size",
        type=whole_number(SMALLEST_VOCAB_SIZE, LARGEST_VOCAB_SIZE),
        default=4096,
        metavar="N",
        help="vocabulary size of the tokenizer to train (default %(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json or SentencePiece .model to use instead of training one, or: bytes",
    )
    parser.add_argument("--eod", type=utf8_text, default="", metavar="TOKEN",
                       help="the token that ends documents (default: the one that tokenizer_config.json or "
                       "generation_config.json beside the tokenizer names, else that of a known model)")  # fmt: skip
    parser.add_argument(
        "--text-key", type=utf8_text, default="text", help="key or column that holds the text (default %(default)s)"
    )
    parser.add_argument(
        "--validation",
        type=real_number("a number above 0 and below 1", lambda share: 0 < share < 1),
        default=0.02,
        metavar="SHARE",
        help="share of the documents to hold out for validation (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=1, metavar="N", help="seed of the order of documents (default %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="number of threads or processes that tokenize; it does not change the files (default: one per core)",
    )
    parser.add_argument("--strict", action="store_true", help="refuse folders with files that would be left out")
    add_force(parser, "a data directory")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.build import build
    from megatrain.data.build_tokenizer import BuildOptions

    options = BuildOptions(
        vocab_size=args.vocab_size,
        tokenizer_path=args.tokenizer,
        end=args.eod,
        text_key=args.text_key,
        validation_fraction=args.validation,
        seed=args.seed,
    )
    with orderly_end():
        meta = build(
            args.input,
            args.output,
            options,
            num_workers=args.workers,
            is_forced=args.force,
            is_strict=args.strict,
            report=lambda line: print(line, file=sys.stderr if args.is_json else sys.stdout, flush=True),
        )
    if args.is_json:
        print_json({"output": str(args.output), "meta": asdict(meta)})
    else:
        print("\n".join(directory_lines(meta, args.output)))
    return 0
