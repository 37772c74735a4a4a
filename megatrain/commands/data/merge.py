"""`megatrain data merge`: join data directories, or pairs of token files, into one directory."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megatrain.commands.argument_types import Verbs, add_json, utf8_path
from megatrain.commands.data.arguments import add_force, directory_lines
from megatrain.commands.printing import print_json, print_lines
from megatrain.programs.stop_signals import orderly_end


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "merge", help="join data directories, or pairs of token files, into one directory", allow_abbrev=False
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=utf8_path,
        metavar="INPUT",
        help="data directories of one tokenizer, or prefixes of pairs, in the order of the result",
    )
    parser.add_argument("--output", type=utf8_path, required=True, metavar="DIR", help="the directory to create")
    add_force(parser, "a data directory")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.merge import merge

    with orderly_end():
        meta = merge(args.inputs, args.output, is_forced=args.force)
    if args.is_json:
        print_json({"output": str(args.output), "meta": asdict(meta) if meta is not None else None})
    elif meta is not None:
        print_lines(directory_lines(meta, args.output))
    else:
        print_lines([f"data is in {args.output}: set data.train={args.output / 'train'}"])
    return 0
