"""`megatrain data verify`: read all token files, and name each place that differs from what was built."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megatrain.commands.argument_types import Verbs, add_json, whole_number
from megatrain.commands.data.arguments import data_path
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.exit_codes import ExitCode


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "verify", help="read all of a data directory or a pair, and name what is wrong", allow_abbrev=False
    )
    parser.add_argument(
        "path", type=data_path, metavar="PATH", help="a data directory or the prefix of a pair; may be a URL"
    )
    parser.add_argument(
        "--vocab-size",
        type=whole_number(1),
        metavar="N",
        help="token ids must be below N (default: the vocabulary that meta.json states)",
    )
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Verify. Return ExitCode.DATA if a problem was found, else OK. Raises: DataError if there is nothing to verify."""
    from megatrain.data.verification import verify_data

    pairs = verify_data(args.path, args.vocab_size)
    is_sound = not any(pair.problems for pair in pairs)
    if args.is_json:
        print_json({"is_sound": is_sound, "pairs": [asdict(pair) for pair in pairs]})
    else:
        for pair in pairs:
            state = "DAMAGED" if pair.problems else f"OK, {pair.documents:,} documents, {pair.tokens:,} tokens"
            print_lines([f"{pair.prefix}: {state}", *(f"  {problem}" for problem in pair.problems)])
    return ExitCode.OK if is_sound else ExitCode.DATA
