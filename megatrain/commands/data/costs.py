"""`megatrain data costs`: store a cost for each document of a pair, for a run with data.balance="file"."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from megatrain.commands.argument_types import Verbs, add_json, utf8_path
from megatrain.commands.data.arguments import add_force, add_prefix
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.errors import DataError
from megatrain.formatting import count_text
from megatrain.programs.stop_signals import orderly_end


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "costs",
        help="store a cost for each document of a pair, by which replicas are balanced",
        allow_abbrev=False,
    )
    add_prefix(parser)
    parser.add_argument(
        "--input",
        type=utf8_path,
        required=True,
        metavar="FILE",
        help="a text file with an integer from 0 to 4294967295 for each document, one a line, in the order of the "
        "documents; -: the standard input",
    )
    add_force(parser, "a file of costs")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Raises: DataError."""
    from megatrain.data.costs import costs_path, write_costs
    from megatrain.data.indexed import IndexedDataset

    path = costs_path(args.prefix)
    if path.exists() and not args.force:
        raise DataError(f"{path}: exists; replace it with --force, or remove it")
    dataset, is_stream = IndexedDataset(args.prefix), args.input == Path("-")
    try:
        lines = nullcontext(sys.stdin) if is_stream else args.input.open(encoding="ascii", errors="replace")
    except OSError as error:
        raise DataError(f"{args.input}: cannot be read: {error.strerror}; give a file that exists") from error
    with orderly_end(), lines as file:
        done = write_costs(dataset, file, "the standard input" if is_stream else str(args.input))
    if args.is_json:
        print_json({"path": str(path), **asdict(done)})
        return 0
    mean = done.total / max(1, done.num_documents)
    costs = f"costs from a mean of {mean:,.1f} to {done.largest:,}"
    print_lines([f"{path}: {count_text(done.num_documents, 'document')}, {costs}"])
    return 0
