"""`megatrain ckpt reshard CHECKPOINT --output DIR`: write a checkpoint in another layout."""

from __future__ import annotations

import argparse

from megatrain.checkpoint.survey import stored_bytes
from megatrain.checkpoint_format.url_location import open_location
from megatrain.commands.argument_types import Verbs, add_json, utf8_text, whole_number
from megatrain.commands.checkpoint_choice import add_checkpoint, chosen_checkpoint, reading
from megatrain.commands.printing import print_json, print_lines
from megatrain.config.parallel import LARGEST_SIZE, configurable_axes
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.layout import Layout
from megatrain.formatting import bytes_text
from megatrain.programs.stop_signals import orderly_end


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "reshard", help="write a checkpoint in another layout, offline (needs torch)", allow_abbrev=False
    )
    add_checkpoint(parser)
    parser.add_argument("--output", type=utf8_text, required=True, metavar="DIR", help="the checkpoint to create")
    for axis in configurable_axes():
        parser.add_argument(f"--{axis.name}", type=whole_number(1, LARGEST_SIZE), default=1, metavar="N",
                            help=f"{axis.title}-parallel size (default 1)")  # fmt: skip
    parser.add_argument("--chunks", type=whole_number(1, LARGEST_SIZE), default=1, metavar="N",
                        help="chunks of a pipeline stage (default 1)")  # fmt: skip
    parser.add_argument("--layers-per-chunk", type=whole_number(0, LARGEST_SIZE), default=[], metavar="N", nargs="+",
                        help="layers of each chunk, in the model's order (default: an even split)")  # fmt: skip
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Write the new checkpoint.

    Raises: ConfigError when the model cannot be trained in that layout; CheckpointError that names the file.
    """
    from megatrain.conversion.reshard import reshard

    source = chosen_checkpoint(args)
    layout = Layout(**{axis.size_name: getattr(args, axis.name) for axis in configurable_axes()})
    with orderly_end(), reading(source):
        report = reshard(source, open_location(args.output), layout, args.chunks, tuple(args.layers_per_chunk))
    num_bytes = stored_bytes(report.manifest)
    if args.is_json:
        print_json({
            "source": str(source), "place": args.output, "step": report.manifest.step, "num_bytes": num_bytes,
            "num_files": len(report.manifest.files), "bytes_read": report.bytes_read,
        })  # fmt: skip
    else:
        written = f"{bytes_text(num_bytes)} in {len(report.manifest.files)} files, step {report.manifest.step}"
        mesh = f"{layout.sizes_text}, chunks {args.chunks}"
        if args.layers_per_chunk:
            mesh += f", layers {' + '.join(map(str, args.layers_per_chunk))}"
        print_lines(
            [f"{args.output}: {written}, {mesh}", f"read {bytes_text(report.bytes_read)} from {source}"],
        )
    return int(ExitCode.OK)
