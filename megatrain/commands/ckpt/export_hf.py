"""`megatrain ckpt export-hf CHECKPOINT --output DIR`: write a directory that the transformers library loads."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatrain.commands.argument_types import Verbs, add_json, utf8_path, utf8_text
from megatrain.commands.checkpoint_choice import add_checkpoint, add_ema, chosen_checkpoint, reading
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import bytes_text
from megatrain.programs.stop_signals import orderly_end

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9]{1,12})\s*([A-Za-z]*)")


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "export-hf", help="write a Hugging Face model directory (needs torch)", allow_abbrev=False
    )
    add_checkpoint(parser)
    parser.add_argument("--output", type=utf8_path, required=True, metavar="DIR", help="the directory to create")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32",
                        help="dtype of the exported weights (default %(default)s, as they are stored)")  # fmt: skip
    add_ema(parser)
    parser.add_argument("--max-shard-size", type=size_in_bytes, default=5 * 10**9, metavar="SIZE",
                        help="largest size of a weight file, for example 500MB or 2GiB (default 5GB)")  # fmt: skip
    parser.add_argument(
        "--no-tokenizer", action="store_false", dest="has_tokenizer", help="do not export the tokenizer"
    )
    parser.add_argument("--eod", type=utf8_text, default="", metavar="TOKEN",
                        help="the tokenizer's token that ends documents (default: as in the checkpoint)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def size_in_bytes(text: str) -> int:
    """Return a number of bytes, given with or without a unit."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match is not None else None
    if match is None or unit is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size like 500MB, 2GiB or 1000000")
    return int(match[1]) * unit


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint.

    Raises: ConfigError if no supported Hugging Face architecture can represent the model; CheckpointError or DataError
    that names the file.
    """
    from megatrain.conversion.hugging_face import export_hf

    source = chosen_checkpoint(args)
    with orderly_end(), reading(source):
        report = export_hf(
            source,
            Path(args.output),
            kind=args.kind,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_size,
            has_tokenizer=args.has_tokenizer,
            end=args.eod,
            is_forced=args.force,
        )
    if args.is_json:
        print_json({
            "source": str(source), "place": str(report.directory), "architecture": report.architecture,
            "dtype": report.dtype, "num_tensors": report.num_tensors, "num_parameters": report.num_parameters,
            "files": [{"name": name, "num_bytes": size} for name, size in report.files], "notes": list(report.notes),
        })  # fmt: skip
        return int(ExitCode.OK)
    size = bytes_text(sum(size for _, size in report.files))
    print_lines([
        f"{report.directory}: {report.architecture}, {report.num_parameters:,} parameters in {report.dtype}, {size}",
        *(f"  {name}  {bytes_text(size)}" for name, size in report.files),
    ])  # fmt: skip
    for note in report.notes:
        print_note(f"note: {note}")
    return int(ExitCode.OK)
