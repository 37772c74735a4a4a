"""`megatrain ckpt import-hf HF_DIR --output DIR`: write a checkpoint from which training starts, in any layout."""

from __future__ import annotations

import argparse

from megatrain.checkpoint.survey import stored_bytes
from megatrain.checkpoint_format.url_location import open_location
from megatrain.commands.argument_types import Verbs, add_json, utf8_path, utf8_text
from megatrain.commands.printing import print_json, print_lines, print_note
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import bytes_text
from megatrain.programs.stop_signals import orderly_end


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "import-hf", help="convert a Hugging Face model directory to a checkpoint (needs torch)", allow_abbrev=False
    )
    parser.add_argument(
        "source",
        type=utf8_path,
        metavar="HF_DIR",
        help="directory of config.json, .safetensors files and tokenizer.json",
    )
    parser.add_argument("--output", type=utf8_text, required=True, metavar="DIR", help="the checkpoint to create")
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Import the model, and print the sections for a job's configuration.

    Raises: CheckpointError that names the file and the tensor.
    """
    from megatrain.conversion.hugging_face import MODEL_TOML_NAME, import_hf

    with orderly_end():
        report = import_hf(args.source, open_location(args.output))
    num_bytes = stored_bytes(report.manifest)
    if args.is_json:
        print_json({
            "source": str(args.source), "place": args.output, "architecture": report.architecture,
            "num_parameters": report.num_parameters, "num_bytes": num_bytes, "toml": report.toml,
            "notes": list(report.notes),
        })  # fmt: skip
        return int(ExitCode.OK)
    print_lines([
        f"# {args.output}: {report.architecture}, {report.num_parameters:,} parameters, {bytes_text(num_bytes)}",
        f"# to start a job from it, add these sections to its configuration ({MODEL_TOML_NAME} there has them too)",
        "",
        report.toml.rstrip("\n"),
    ])  # fmt: skip
    for note in report.notes:
        print_note(f"note: {note}")
    return int(ExitCode.OK)
