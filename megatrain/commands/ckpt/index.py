"""`megatrain ckpt index CHECKPOINT`: write the index of a checkpoint that has none, so that no verb needs torch to read
it.
"""

from __future__ import annotations

import argparse

from megatrain.checkpoint.checked_files import checked_index
from megatrain.commands.checkpoint_choice import add_checkpoint, chosen_checkpoint, reading
from megatrain.commands.ckpt.arguments import Verbs, add_json
from megatrain.commands.printing import print_json, print_lines
from megatrain.contracts.checkpoint_files import INDEX_NAME, add_index, read_manifest
from megatrain.contracts.exit_codes import ExitCode


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("index", help="write the index of an older checkpoint (needs torch)", allow_abbrev=False)
    add_checkpoint(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Write the index, unless the checkpoint was written with one. Raises: CheckpointError when metadata is damaged."""
    checkpoint = chosen_checkpoint(args)
    manifest = read_manifest(checkpoint)
    name = manifest.name_of(INDEX_NAME)
    has_index = name in manifest.files
    if not has_index:
        with reading(checkpoint):
            add_index(checkpoint, name, checked_index(checkpoint, manifest))
    if args.is_json:
        print_json({"place": str(checkpoint), "index": name, "is_written": not has_index})
    else:
        print_lines([f"{checkpoint}: {name} {'was there already' if has_index else 'is written'}"])
    return int(ExitCode.OK)
