"""`megatrain data`: build token files from text, and inspect them. Loads no torch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from megatrain.commands.argument_types import real_number, seed, utf8_path, utf8_text, whole_number
from megatrain.commands.orderly_end import orderly_end
from megatrain.data.tokenizer import SMALLEST_VOCAB_SIZE

SUMMARY = "build token files from text, or inspect them"
LARGEST_VOCAB_SIZE = 10_000_000
"""Ten times the largest known vocabulary. The limit exists because the trainer allocates the whole vocabulary."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two verbs and their options."""
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="{build,inspect}")
    build = verbs.add_parser(
        "build", help="build a directory of token files, tokenizer.json and meta.json from text", allow_abbrev=False
    )
    build.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="SRC",
        help=".txt, .jsonl, .json, .parquet or .arrow files, also compressed (.gz, .zst, .bz2, .xz), folders of them, "
        "patterns ('docs/*.jsonl'), URLs (s3://...), or python-stdlib (this Python's own library)",
    )
    build.add_argument("--output", type=utf8_path, required=True, metavar="DIR", help="the directory to create")
    build.add_argument(
        "--vocab-size",
        type=whole_number(SMALLEST_VOCAB_SIZE, LARGEST_VOCAB_SIZE),
        default=4096,
        metavar="N",
        help="vocabulary size of the tokenizer to train (default %(default)s)",
    )
    build.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json or SentencePiece .model to use instead of training one, or: bytes",
    )
    build.add_argument("--eod", type=utf8_text, default="", metavar="TOKEN",
                       help="the tokenizer's token that ends documents (default: eos_token of the "
                       "tokenizer_config.json beside it, else the one of a known model)")  # fmt: skip
    build.add_argument(
        "--text-key", type=utf8_text, default="text", help="key or column that holds the text (default %(default)s)"
    )
    build.add_argument(
        "--validation",
        type=real_number("a number above 0 and below 1", lambda share: 0 < share < 1),
        default=0.02,
        metavar="SHARE",
        help="share of the documents to hold out (default %(default)s)",
    )
    build.add_argument(
        "--seed", type=seed, default=1, metavar="N", help="seed of the order of documents (default %(default)s)"
    )
    build.add_argument(
        "--workers",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="processes that tokenize; the files are the same for any number (default: one per core)",
    )
    build.add_argument("--strict", action="store_true", help="refuse a folder with files that are not read")
    build.add_argument("--force", action="store_true", help="replace a data directory that exists")
    inspect = verbs.add_parser("inspect", help="show what a .bin/.idx pair contains", allow_abbrev=False)
    inspect.add_argument("prefix", type=utf8_path, metavar="PREFIX", help="the files' path without .bin or .idx")
    inspect.add_argument(
        "--documents", type=whole_number(0), default=0, metavar="N", help="also decode the first N documents"
    )
    inspect.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json to decode with (default: the one beside the data)",
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb; return the exit code.

    Raises: DataError.
    """
    return _build(args) if args.data_verb == "build" else _inspect(args)


def _build(args: argparse.Namespace) -> int:
    from megatrain.data.build import BuildOptions, build

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
            report=lambda line: print(line, flush=True),
        )
    for name, split in (("train", meta.train), ("validation", meta.validation)):
        print(
            f"{name + ':':<12}{split.documents:>9,} documents {split.tokens:>13,} tokens {split.text_bytes:>14,} bytes"
            f" ({split.text_bytes / split.tokens:.2f} bytes/token)"
        )
    for reason, count in meta.skipped.items():
        print(f"skipped:    {count:>9,} {reason}")
    print(f"unigram entropy of the held-out tokens: {meta.unigram_entropy_nats:.3f} nats/token")
    print(
        f"data is in {args.output}: set data.train={args.output / 'train'} data.validation={args.output / 'validation'}"
    )
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatrain.data.dataset import tokenizer_beside
    from megatrain.data.indexed import IndexedDataset
    from megatrain.data.meta import META_NAME, read_meta
    from megatrain.data.summary import summarize
    from megatrain.data.tokenizer import load_tokenizer

    dataset = IndexedDataset(args.prefix)
    summary = summarize(dataset)
    meta = read_meta(args.prefix.parent / META_NAME)
    texts = []
    if args.documents > 0:
        tokenizer = load_tokenizer(args.tokenizer or tokenizer_beside(args.prefix))
        count = min(args.documents, dataset.num_documents)
        texts = [tokenizer.decode(dataset.document(document).tolist()) for document in range(count)]
    if args.json:
        facts = {**asdict(summary), "vocab_size": meta.vocab_size if meta else None, "documents": texts}
        print(json.dumps(facts, indent=2))
        return 0
    print(f"{args.prefix}: {summary.num_documents:,} documents, {summary.num_tokens:,} tokens of {summary.dtype}")
    print(
        f"document length in tokens: p50 {summary.length_p50:,}  p90 {summary.length_p90:,}  max {summary.length_max:,}"
    )
    vocabulary = f" of a vocabulary of {meta.vocab_size:,}" if meta else ""
    print(
        f"vocabulary: {summary.num_distinct_tokens:,} distinct tokens{vocabulary}, largest id {summary.largest_token:,}"
    )
    print(f"unigram entropy: {summary.unigram_entropy_nats:.3f} nats/token")
    for number, text in enumerate(texts):
        sys.stdout.write(f"--- document {number}\n{text}\n")
    return 0
