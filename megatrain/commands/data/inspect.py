"""`megatrain data inspect`: show what a .bin/.idx pair contains."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from megatrain.commands.argument_types import Verbs, add_json, whole_number
from megatrain.commands.data.arguments import add_prefix, add_tokenizer, chosen_tokenizer
from megatrain.commands.printing import print_json


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("inspect", help="show what a .bin/.idx pair contains", allow_abbrev=False)
    add_prefix(parser)
    parser.add_argument(
        "--documents", type=whole_number(0), default=0, metavar="N", help="also decode the first N documents"
    )
    add_tokenizer(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.indexed import IndexedDataset
    from megatrain.data.meta import META_NAME, read_meta
    from megatrain.data.summary import summarize

    dataset = IndexedDataset(args.prefix)
    summary = summarize(dataset)
    meta = read_meta(args.prefix.parent / META_NAME)
    texts = []
    if args.documents > 0:
        tokenizer = chosen_tokenizer(args)
        count = min(args.documents, dataset.num_documents)
        texts = [tokenizer.decode(dataset.document(document).tolist()) for document in range(count)]
    if args.is_json:
        print_json({**asdict(summary), "vocab_size": meta.vocab_size if meta else None, "documents": texts})
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
