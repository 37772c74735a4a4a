"""The data of a dry run as text: what a new run reads of its sources and validation sets, and how replicas share it.

The functions import modules that load numpy or torch, which `megatrain config` otherwise never loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.commands.printing import table
from megatrain.config.config import Config
from megatrain.config.model_products import document_cost
from megatrain.config.picture_share import mixes_pictures
from megatrain.config.toml_text import value_text
from megatrain.contracts.errors import DataError
from megatrain.formatting import bytes_text, count_text, ranges_text, ranks_text

if TYPE_CHECKING:
    from megatrain.data.reader import BatchReader
    from megatrain.data.remote_path import DataPath

_BALANCED_STEPS = 8
_RANKS_OF_HOST = 8
"""Most hosts have this number of GPUs; the configuration does not state how many ranks a host has."""


def data_lines(config: Config) -> list[str]:
    """Return the lines about the training data, the data loader of a host and the validation sets."""
    return [*_training_lines(config), *_loader_lines(config), *_validation_lines(config)]


def _training_lines(config: Config) -> list[str]:
    """Return a table of the training data and how often a new run reads each source, or why the data cannot be read."""
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
