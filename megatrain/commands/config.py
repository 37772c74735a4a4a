"""`megatrain config`: show a resolved configuration, check it without starting, print the reference of all keys.

A ConfigError has all problems: the command line prints them and exits with ExitCode.CONFIG.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.commands.argument_types import whole_number
from megatrain.commands.config_data import data_lines
from megatrain.config.config import Config
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.model_size import parameters_by_part
from megatrain.config.parallel import LARGEST_SIZE
from megatrain.config.reference import reference_markdown
from megatrain.config.serialize import config_hash, to_toml
from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.layout import Layout
from megatrain.contracts.step_plan import idle_text
from megatrain.formatting import count_text
from megatrain.schedule import bubble_fraction

SUMMARY = "show, check and document the configuration of a run"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `config show`, `config check` and `config reference`."""
    verbs = parser.add_subparsers(dest="config_verb", required=True, metavar="show | check | reference")

    show = verbs.add_parser("show", help="print every key with its value", allow_abbrev=False)
    _add_config_argument(show)
    show.add_argument("--origin", action="store_true", help="show where each value comes from")
    show.add_argument("--json", action="store_true", help="print JSON instead of TOML")

    check = verbs.add_parser("check", help="check a configuration without starting anything", allow_abbrev=False)
    _add_config_argument(check)
    check.add_argument(
        "--world-size",
        type=whole_number(1, LARGEST_SIZE),
        metavar="N",
        help="also check the layout for N processes",
    )
    check.add_argument("--dry-run", action="store_true", help="also lay the model out on all ranks and estimate memory")

    reference = verbs.add_parser("reference", help="print the reference of all keys (Markdown)", allow_abbrev=False)
    _add_config_argument(reference, is_optional=True)
    reference.add_argument("--output", type=Path, metavar="FILE", help="write the reference to FILE instead")
    reference.set_defaults(usage_error=reference.error)


def run(args: argparse.Namespace) -> int:
    """Run `show`, `check` or `reference`.

    Raises: ConfigError with every problem of the configuration; TopologyError when the dry run cannot be planned;
    MegatrainError when the file of --output cannot be written.
    """
    if args.config_verb == "reference":
        if args.config is None and args.overrides:
            args.usage_error(f"{args.overrides[0]}: name the CONFIG that it changes")
        of_run = None if args.config is None else load_config(args.config, args.overrides)
        _write(reference_markdown(of_run), args.output)
    elif args.config_verb == "show":
        loaded = load_config(args.config, args.overrides)
        toml_origins = loaded.origins if args.origin else None
        _write(_shown_json(loaded, args.origin) if args.json else to_toml(loaded.config, toml_origins), None)
    else:
        loaded = load_config(args.config, args.overrides, world_size=args.world_size)
        _write(_summary(loaded.config, args.world_size), None)
        if args.dry_run:
            # Planning needs torch, which `config` otherwise never loads.
            from megatrain.planning.plan_text import dry_run

            config = _with_fixed_layout(loaded.config, args.world_size)
            _write(dry_run(config), None)
            _write("\n".join(["", *data_lines(config)]), None)
    return int(ExitCode.OK)


def _add_config_argument(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    if is_optional:
        help_text = "TOML file of a run, whose values are shown beside the defaults"
        parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=help_text)
    else:
        parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.epilog = "Any key of the file can be set with --section.key=value; the last one wins."


def _write(text: str, output: Path | None) -> None:
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MegatrainError(
            f"cannot write --output={output}: {error.strerror}; name a file that can be written"
        ) from error


def _shown_json(loaded: LoadedConfig, has_origins: bool) -> str:
    shown: dict[str, object] = {"config": loaded.config.to_dict(), "config_hash": config_hash(loaded.config)}
    if has_origins:
        shown["origins"] = {key: str(origin) for key, origin in loaded.origins.items()}
    return json.dumps(shown, indent=2)


def _with_fixed_layout(config: Config, world_size: int | None) -> Config:
    parallel = dataclasses.replace(config.parallel, dp_size=config.layout(world_size).dp_size)
    return dataclasses.replace(config, parallel=parallel)


def _summary(config: Config, world_size: int | None) -> str:
    """Return a summary of the configuration, one fact per line."""
    layout = config.layout(world_size)
    parallel, batch = config.parallel, config.batch
    is_dp_assumed = parallel.dp_size == 0 and world_size is None
    num_microbatches, idle = config.num_microbatches(layout), idle_text(config.dealing(layout))
    chunks = parallel.num_chunks
    size = parameters_by_part(config.model)
    bubble = bubble_fraction(parallel.schedule, layout.pp_size, chunks, num_microbatches)
    encoder = f"encoder and projector {size.encoder:,}, " if size.encoder else ""
    facts = {
        "layout": f"{layout}: {count_text(layout.world_size, 'rank')}"
        + (" (dp_size follows the world size; 1 is assumed here)" if is_dp_assumed else ""),
        "pipeline": f"{parallel.schedule}, {count_text(chunks, 'chunk')} a stage, "
        + _layers_text(config.layers_per_chunk),
        "parameters": f"{size.total:,} ({encoder}embedding {size.embedding:,}, positions {size.position:,}, "
        f"{count_text(size.num_blocks, 'block')} of {size.block:,}, final norm {size.final_norm:,}, "
        f"head {size.head:,})",
        "batch": f"{batch.global_batch_size} sequences of {config.seq_len} tokens = "
        f"{batch.global_batch_size * config.seq_len:,} tokens a step, {_microbatches_text(num_microbatches)} of "
        f"{batch.micro_batch_size} a pipeline" + (f" ({idle})" if idle else "") + _later_batches(config, layout),
        "bubble": f"{bubble:.1%} of the compute time of a stage",
        "hash": config_hash(config),
    }
    return "\n".join(["OK", *(f"  {name:<10}  {fact}" for name, fact in facts.items())])


def _later_batches(config: Config, layout: Layout) -> str:
    """Return the batches and lengths of later stages, as the end of a sentence; empty if there are none."""
    text = ""
    for placed in config.placed_stages:
        stage = placed.stage
        changes = []
        if stage.global_batch_size:
            dealing = config.dealing(layout, stage.global_batch_size)
            idle = f" ({idle_text(dealing)})" if idle_text(dealing) else ""
            slots = _microbatches_text(dealing.max_slots)
            changes.append(f"{stage.global_batch_size} sequences, {slots} a pipeline{idle}")
        if placed.changes_length:
            changes.append(f"{placed.seq_len} tokens a sequence")
        if changes:
            text += f"; from token {stage.after_tokens:,} on {', '.join(changes)}"
    return text


def _microbatches_text(number: int) -> str:
    return count_text(number, "micro-batch", "micro-batches")


def _layers_text(layers: Sequence[int]) -> str:
    """Return the number of layers per chunk: one number if all are equal, else one for each, in the model's order."""
    if len(set(layers)) == 1:
        return f"{count_text(layers[0], 'layer')} a chunk"
    return f"{' + '.join(map(str, layers))} layers in the model's order"
