"""`megatrain config`: show a resolved configuration, check it without starting, print the reference of all keys.

A ConfigError has all problems: the command line prints them and exits with ExitCode.CONFIG.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.argument_types import whole_number
from megatrain.commands.printing import table
from megatrain.config.config import Config
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.model_products import document_cost
from megatrain.config.model_size import parameters_by_part
from megatrain.config.parallel import LARGEST_SIZE
from megatrain.config.picture_share import mixes_pictures
from megatrain.config.reference import reference_markdown
from megatrain.config.serialize import config_hash, to_toml
from megatrain.config.toml_text import value_text
from megatrain.contracts.errors import DataError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.layout import Layout
from megatrain.contracts.step_plan import idle_text
from megatrain.formatting import bytes_text, count_text, ranges_text, ranks_text
from megatrain.schedule import bubble_fraction

if TYPE_CHECKING:
    from megatrain.data.reader import BatchReader
    from megatrain.data.remote_path import DataPath

SUMMARY = "show, check and document the configuration of a run"
ACCEPTS_OVERRIDES = True
_BALANCED_STEPS = 8
_RANKS_OF_HOST = 8
"""Most hosts have as many GPUs; the configuration does not state how many ranks a host has."""


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

    Raises: ConfigError with every problem of the configuration.
    """
    if args.config_verb == "reference":
        if args.config is None and args.overrides:
            args.usage_error(f"{args.overrides[0]}: name the CONFIG that it changes")
        of_run = None if args.config is None else load_config(args.config, args.overrides)
        _write(reference_markdown(of_run), args.output)
    elif args.config_verb == "show":
        loaded = load_config(args.config, args.overrides)
        _write(_shown_json(loaded, args.origin) if args.json else _shown_toml(loaded, args.origin), None)
    else:
        loaded = load_config(args.config, args.overrides, world_size=args.world_size)
        _write(_summary(loaded.config, args.world_size), None)
        if args.dry_run:
            # Planning needs torch, which `config` otherwise never loads.
            from megatrain.planning.plan_text import dry_run

            config = _with_fixed_layout(loaded.config, args.world_size)
            _write(dry_run(config), None)
            _write("\n".join(["", *_data_lines(config), *_loader_lines(config), *_validation_lines(config)]), None)
    return int(ExitCode.OK)


def _data_lines(config: Config) -> list[str]:
    """Return a table of the training data and how often a new run reads each source, or why the data cannot be read."""
    # These modules load numpy and torch, which `config` otherwise never loads.
    from megatrain.data.epochs import check_epochs, source_uses
    from megatrain.training.training_data import open_reader, tokenizer_notes

    if not config.data_sources:
        return ["Training data: the configuration names none"]
    try:
        reader = open_reader(config)
    except DataError as error:
        return [f"Training data: {_why_not_read(config, error)}"]
    uses = source_uses(reader, config.batch_schedule.cursor_after(0, config.train.steps, skipped=()))
    rows = [
        [
            use.name,
            f"{use.source.dataset.num_tokens:,}",
            f"{use.num_samples:,}",
            f"{use.share:.2%}",
            f"{use.epochs:.3g}",
            f"{use.source.max_epochs:g}" if use.source.max_epochs else "any",
        ]
        for use in uses
    ]
    are_shards = {source.pictures == "shards" for source in config.data_sources.values()}
    unit = "tokens or pictures" if len(are_shards) > 1 else "pictures" if are_shards == {True} else "tokens"
    heads = ["source", unit, "samples read", "share", "epochs", "at most"]
    lines = [*tokenizer_notes(config), f"Training data of a new run until step {config.train.steps:,}"]
    lines += [f"  {line}" for line in table([heads, *rows], [0])]
    lines += [
        f"  from token {stage.after_tokens:,} on: {_shares_text(stage.weight_of)}"
        for stage in config.data_stages
        if stage.weights
    ]
    try:
        check_epochs(uses)
    except DataError as error:
        lines.append(f"  THE RUN WOULD NOT START: {error}")
    return [*lines, *_balance_lines(config, reader)]


def _balance_lines(config: Config, reader: BatchReader) -> list[str]:
    """Return how unequally replicas compute in the first steps of full size, with and without data.balance."""
    # this module loads numpy, which `config` otherwise never loads
    from megatrain.data.imbalance import expected_imbalance

    layout = config.layout(None)
    is_by_file = config.data.balance == "file"
    by_cost_of = ["lengths of documents"] * config.data.has_document_mask + ["pictures"] * mixes_pictures(config)
    if layout.num_sample_parts == 1 or not (by_cost_of or is_by_file):
        return []
    plans = config.steps(layout, config.batch.rampup_samples, _BALANCED_STEPS).plans()
    in_order, by_cost = expected_imbalance(reader, plans, document_cost(config.model))
    measure, name = ("costs in the files", "file") if is_by_file else (" and the ".join(by_cost_of), "cost")
    text = (
        f"  data.balance={value_text(config.data.balance)}: by the {measure}, the replica that computes longest takes "
        f'{in_order:.3f} times the mean with "none", {by_cost:.3f} with "{name}" ({_BALANCED_STEPS} steps)'
    )
    return [text]


def _loader_lines(config: Config) -> list[str]:
    """Return what the data loader of the first host reads, and the size of its ring."""
    # these modules load numpy, which `config` otherwise never loads
    from megatrain.data.loader.plan import shares_of
    from megatrain.data.loader.ring_layout import RingLayout

    if config.data.loader != "host":
        return []
    layout = config.layout(None)
    ranks = range(min(_RANKS_OF_HOST, layout.world_size))
    replicas = [share.replica for share in shares_of(layout, ranks)]
    text = (
        f'  data.loader="host": the loader of a host with {ranks_text(ranks)} reads '
        f"{count_text(len(replicas), 'replica')} ({ranges_text(replicas)}), into a ring of "
        f"{bytes_text(RingLayout.of_host(config, layout, ranks).num_bytes)} for "
        f"{count_text(config.data.prefetch + 1, 'step')} (data.prefetch={config.data.prefetch})"
    )
    return [text]


def _why_not_read(config: Config, error: DataError) -> str:
    """Return the error as a line: the run would not start, or the data are only absent on this machine."""
    from megatrain.data.indexed import data_path, index_path
    from megatrain.data.pictures.picture_index import INDEX_NAME
    from megatrain.training.training_data import data_prefixes

    with suppress(DataError):  # storage that cannot be reached from here
        prefixes = data_prefixes(config).values()
        files: list[DataPath] = [path for one in prefixes for path in (data_path(one), index_path(one))]
        if any(source.pictures == "shards" for source in config.data_sources.values()):
            files.append(Path(config.pictures.shards, INDEX_NAME))
        shards = (one.path for one in config.validation_sets.values() if one.pictures == "shards")
        files += [Path(path, INDEX_NAME) for path in shards]
        if all(path.exists() for path in files):
            return f"THE RUN WOULD NOT START: {error}"
    return f"not checked, because they cannot be read here: {error}"


def _shares_text(weights: Mapping[str, float]) -> str:
    total = sum(weights.values())
    return ", ".join(f"{name} {weight / total:.2%}" for name, weight in weights.items() if weight)


def _validation_lines(config: Config) -> list[str]:
    """Return a table of the validation sets and the samples that an evaluation uses, or why they cannot be read."""
    from megatrain.training.training_data import open_validation

    if not config.validation_sets:
        return []
    try:
        sets = open_validation(config)
    except DataError as error:
        return [f"Validation sets: {_why_not_read(config, error)}"]
    rows = [[one.name, f"{one.dataset.num_tokens:,}", f"{one.num_samples:,}"] for one in sets]
    has_shards = any(one.pictures == "shards" for one in config.validation_sets.values())
    heads = ["validation set", "tokens or pictures" if has_shards else "tokens", "samples per evaluation"]
    return ["Validation sets", *(f"  {line}" for line in table([heads, *rows], [0]))]


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


def _shown_toml(loaded: LoadedConfig, has_origins: bool) -> str:
    return to_toml(loaded.config, loaded.origins if has_origins else None)


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
        "layout": f"{layout}: {layout.world_size} {'rank' if layout.world_size == 1 else 'ranks'}"
        + (" (dp_size follows the world size; 1 is assumed here)" if is_dp_assumed else ""),
        "pipeline": f"{parallel.schedule}, {chunks} {'chunk' if chunks == 1 else 'chunks'} a stage, "
        + _layers_text(config.layers_per_chunk),
        "parameters": f"{size.total:,} ({encoder}embedding {size.embedding:,}, positions {size.position:,}, "
        f"{size.num_blocks} blocks of {size.block:,}, final norm {size.final_norm:,}, head {size.head:,})",
        "batch": f"{batch.global_batch_size} sequences of {config.seq_len} tokens = "
        f"{batch.global_batch_size * config.seq_len:,} tokens a step, {num_microbatches} micro-batches of "
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
            changes.append(f"{stage.global_batch_size} sequences, {dealing.max_slots} micro-batches a pipeline{idle}")
        if placed.changes_length:
            changes.append(f"{placed.seq_len} tokens a sequence")
        if changes:
            text += f"; from token {stage.after_tokens:,} on {', '.join(changes)}"
    return text


def _layers_text(layers: Sequence[int]) -> str:
    """Return the number of layers per chunk: one number if all are equal, else one for each, in the model's order."""
    if len(set(layers)) == 1:
        return f"{layers[0]} {'layer' if layers[0] == 1 else 'layers'} a chunk"
    return f"{' + '.join(map(str, layers))} layers in the model's order"
