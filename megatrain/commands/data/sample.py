"""`megatrain data sample`: show documents drawn at random, or the samples that training reads."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megatrain.commands.argument_types import Verbs, add_json, seed, whole_number
from megatrain.commands.data.arguments import add_prefix, add_tokenizer, chosen_tokenizer
from megatrain.commands.printing import print_json
from megatrain.formatting import printable


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "sample", help="show documents drawn at random, or the samples that training reads", allow_abbrev=False
    )
    add_prefix(parser)
    parser.add_argument("--count", type=whole_number(1), default=3, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--seed", type=seed, default=1, metavar="N",
                        help="seed of the draw; with --seq-len the run's data.seed (default %(default)s)")  # fmt: skip
    parser.add_argument("--seq-len", type=whole_number(1), metavar="S",
                        help="show training samples of S tokens in place of documents (data.seq_len, else "
                        "model.seq_len, of the run)")  # fmt: skip
    parser.add_argument("--first", type=whole_number(0), default=0, metavar="K",
                        help="with --seq-len: number of the first sample, counted from the run's start")  # fmt: skip
    parser.add_argument("--max-tokens", type=whole_number(1), default=200, metavar="N",
                        help="decode at most N tokens of each (default %(default)s)")  # fmt: skip
    add_tokenizer(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.indexed import IndexedDataset
    from megatrain.data.sampling import drawn_documents, training_samples

    if args.first and args.seq_len is None:
        args.usage_error("--first counts training samples; give their length with --seq-len")
    dataset = IndexedDataset(args.prefix)
    tokenizer = chosen_tokenizer(args)
    if args.seq_len is None:
        kind, ranges = "document", drawn_documents(dataset, args.count, args.seed)
    else:
        kind, ranges = "sample", training_samples(dataset, args.seq_len, args.seed, args.first, args.count)
    found = [
        {
            **asdict(sample),
            "text": tokenizer.decode(dataset.window(sample.start, min(sample.num_tokens, args.max_tokens)).tolist()),
        }
        for sample in ranges
    ]
    if args.is_json:
        print_json({"prefix": str(args.prefix), "kind": kind, "samples": found})
        return 0
    for sample in found:
        print(f"--- {kind} {sample['number']}: {sample['num_tokens']:,} tokens from position {sample['start']:,}")
        print("\t".join(printable(part) for part in str(sample["text"]).split("\t")))
    return 0
