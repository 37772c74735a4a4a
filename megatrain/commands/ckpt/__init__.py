"""`megatrain ckpt`: list, inspect, verify, compare, remove and convert checkpoints; choose where a run resumes.

Only `reshard`, `export-hf`, `import-hf` and `diff --tensors` load torch.
"""

from __future__ import annotations

import argparse

from megatrain.commands.ckpt import (
    diff,
    export_hf,
    import_hf,
    inspect,
    listing,
    pinning,
    prune,
    reshard,
    restore,
    verify,
)

SUMMARY = "list, verify, compare, restore, prune and convert checkpoints"

_VERBS = (listing, inspect, verify, diff, restore, prune, pinning, reshard, export_hf, import_hf)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their options."""
    verbs = parser.add_subparsers(dest="ckpt_verb", required=True, metavar="SUBCOMMAND")
    for module in _VERBS:
        module.add_verb(verbs)


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand; return the exit code.

    Raises: CheckpointError, ConfigError, DataError.
    """
    code: int = args.run_verb(args)
    return code
