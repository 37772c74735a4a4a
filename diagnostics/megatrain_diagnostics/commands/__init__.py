"""`megatrain diag`: what a job's events say; the daemon; and what is recorded.

Every analysis reads the segments in <run>/events, of a job that runs as of one that is over: the daemon need not live.
"""

from __future__ import annotations

import argparse
from types import ModuleType

SUMMARY = "stragglers, hangs, timelines and what-if from the events of all ranks; the daemon; what is recorded"

_VERBS: tuple[ModuleType, ...] = ()
"""Modules with `add_verb(verbs)`, which sets the default `run_verb`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their options."""
    verbs = parser.add_subparsers(dest="diag_verb", required=True, metavar="VERB")
    for module in _VERBS:
        module.add_verb(verbs)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks; return the exit code. Raises: MegatrainError."""
    code: int = args.run_verb(args)
    return code
