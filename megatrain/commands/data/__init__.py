"""`megatrain data`: build token files from text; inspect, verify, sample, pack, merge and export them; store the costs
of documents; index and serve pictures.

Loads no torch.
"""

from __future__ import annotations

import argparse

from megatrain.commands.data import build, costs, export, inspect, merge, pack, pictures, sample, verify

SUMMARY = (
    "build token files from text; inspect, verify, sample, pack, merge and export them; store costs; index pictures"
)

_VERBS = (build, inspect, verify, sample, pack, costs, merge, export, pictures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their options."""
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="SUBCOMMAND")
    for module in _VERBS:
        module.add_verb(verbs)


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand; return the exit code.

    Raises: DataError.
    """
    code: int = args.run_verb(args)
    return code
