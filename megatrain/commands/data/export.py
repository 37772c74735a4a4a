"""`megatrain data export`: write documents of token files as text or ids, for other programs."""

from __future__ import annotations

import argparse

from megatrain.commands.argument_types import Verbs, add_json, utf8_path, utf8_text, whole_number
from megatrain.commands.data.arguments import add_force, add_prefix, add_tokenizer, chosen_tokenizer
from megatrain.commands.printing import print_json, print_lines
from megatrain.formatting import count_text
from megatrain.programs.stop_signals import orderly_end


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("export", help="write documents of a .bin/.idx pair as text or ids", allow_abbrev=False)
    add_prefix(parser)
    parser.add_argument("--output", type=utf8_path, required=True, metavar="FILE",
                        help="a .jsonl (also .gz, .zst, .bz2, .xz), .parquet or .arrow file to create")  # fmt: skip
    parser.add_argument("--ids", action="store_true", help="write token ids, not text")
    parser.add_argument("--key", type=utf8_text, metavar="KEY",
                        help="key or column of each document (default: text, or tokens with --ids)")  # fmt: skip
    parser.add_argument("--first", type=whole_number(0), default=0, metavar="K", help="number of the first document")
    parser.add_argument("--count", type=whole_number(1), metavar="N", help="how many documents (default: all)")
    add_tokenizer(parser)
    add_force(parser, "a file")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Export the documents. Raises: DataError."""
    from megatrain.data.export import exported, write_records
    from megatrain.data.indexed import IndexedDataset

    dataset = IndexedDataset(args.prefix)
    tokenizer = None if args.ids else chosen_tokenizer(args)
    key = args.key or ("tokens" if args.ids else "text")
    records = exported(dataset, tokenizer, args.first, args.count or dataset.num_documents)
    with orderly_end():
        num_documents = write_records(records, key, args.output, is_forced=args.force)
    if args.is_json:
        print_json({"output": str(args.output), "key": key, "documents": num_documents})
    else:
        print_lines([f"{args.output}: {count_text(num_documents, 'document')}"])
    return 0
