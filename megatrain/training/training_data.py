"""Opens the training and held-out data that a configuration names, and describes the sample order for checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.config import Config
from megatrain.config.data import DataSourceConfig, integer_weights
from megatrain.config.evaluation import ValidationSetConfig
from megatrain.config.model_products import DocumentCost, document_cost
from megatrain.contracts.errors import DataError
from megatrain.data.block_cache import CacheSettings
from megatrain.data.costs import DocumentCosts
from megatrain.data.dataset import (
    check_same_tokenizer,
    check_tokenizer,
    check_vocabulary,
    open_dataset,
    tokenizer_digest,
)
from megatrain.data.drawn_pictures import DrawnPictures
from megatrain.data.held_out import WindowOrder, held_out_reader, num_windows
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import META_NAME, DataMeta, read_metas
from megatrain.data.mixture import Mixture
from megatrain.data.one_piece_order import OnePieceOrder
from megatrain.data.order import order_of
from megatrain.data.packing import ALGORITHM
from megatrain.data.parts import PartSizes
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.reader import BatchReader
from megatrain.data.remote_path import DataPath, RemotePath, path_or_url
from megatrain.data.side_by_side import MOST_THREADS, side_by_side
from megatrain.data.token_stream import TokenStream
from megatrain.data.training_source import TrainingSource
from megatrain.training.picture_data import picture_source, shards_of

LONGEST_WAIT_S = 900.0
"""Reads of object storage and requests to producers fail within a few minutes, so none takes this long."""


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A set of held-out data, and how many samples of it an evaluation takes.

    `reader`: of its only source. `text_bytes`: the size of the text, None if it is unknown. `digest`: of the content.
    """

    name: str
    reader: BatchReader
    num_samples: int
    text_bytes: int | None
    digest: str

    @property
    def dataset(self) -> TokenStream:
        (source,) = self.reader.sources
        assert source is not None
        return source.dataset


def open_reader(config: Config) -> BatchReader:
    """Return the reader of the training data, in the order of a new run.

    Raises: DataError when files cannot be used, when their tokenizers differ from each other, from data.tokenizer or
    from the model, and when two sources have the same content; or when the vocabulary of drawn pictures is too large,
    or the index of shards of pictures or the tokenizer of their captions cannot be used.
    """
    prefixes = data_prefixes(config)
    metas = read_metas(prefixes)
    check_same_tokenizer(prefixes, metas)
    if config.data.tokenizer:
        for key, prefix in prefixes.items():
            check_tokenizer(Path(config.data.tokenizer), prefix, metas[key], config.model.vocab_size)
    replaces_bad_samples = config.data.bad_samples == "replace"
    mixture = Mixture(config.resolved_data_seed, planned_stages(config), len(config.data_sources))
    sources: list[TrainingSource] = []
    opened: list[tuple[str, DataPath, str]] = []

    def open_one(key: str) -> tuple[IndexedDataset, str]:
        check_vocabulary(prefixes[key], metas[key], config.model.vocab_size)
        return open_dataset(prefixes[key], config.model.vocab_size, replaces_bad_samples=replaces_bad_samples)

    keys = [key for key, source in config.data_sources.items() if not source.has_pictures]
    # the blocks of one remote source are already fetched at the same time
    is_remote = any(isinstance(prefixes[key], RemotePath) for key in keys)
    num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    pairs = map(open_one, keys) if is_remote else side_by_side(open_one, keys, num_threads)
    found = dict(zip(keys, pairs, strict=True))
    for key, source in config.data_sources.items():
        if source.has_pictures:
            sources.append(replace(picture_source(config, key, source), max_epochs=source.max_epochs))
            continue
        dataset, digest = found[key]
        is_packed = config.data.packing != "none"
        sizes = PartSizes(config.data.block_tokens, config.data.part_tokens)
        # a source that begins in a later stage needs no samples of the lengths before
        seq_len = mixture.lengths_of(len(sources))[0].seq_len
        order = order_of(dataset, seq_len, config.resolved_data_seed, is_packed=is_packed, sizes=sizes)
        identity = StreamSource(source.resolved_name, dataset.num_tokens, digest)
        costs = DocumentCosts(dataset) if config.data.balance == "file" else None
        sources.append(TrainingSource(identity, dataset, order, key.partition(".")[0], source.max_epochs, costs))
        opened.append((f"{sources[-1].section}.path", prefixes[key], identity.digest))
    _refuse_duplicates(opened, "use one source with the sum of their weights")
    has_mask = config.data.has_document_mask
    return BatchReader.of(sources, mixture, has_mask, replaces_bad_samples, balanced_cost(config))


def all_shards(reader: BatchReader, validation: Iterable[ValidationSet]) -> list[ShardSamples]:
    """Return the pictures from shards of the training data, and then those of the sets of held-out data."""
    found = [shards_of(one) for one in (reader, *(validation_set.reader for validation_set in validation))]
    return [shards for shards in found if shards is not None]


def has_limited_waits(reader: BatchReader) -> bool:
    """Return whether every read has a time limit: reads of object storage and producers do, reads of a disk do not."""
    opened = [source for source in reader.sources if source is not None]
    return all(
        source.dataset.cache_use is not None or isinstance(source.pictures, (ShardSamples, DrawnPictures))
        for source in opened
    )


def shown_wait(
    reader: BatchReader, show_liveness: Callable[[], None], clock_s: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    """Return what a rank calls while it waits for a step, so that it does not count as hung.

    It does nothing if a read may never return. After LONGEST_WAIT_S it does nothing either, because then something
    other than a read hangs.
    """
    if not has_limited_waits(reader):
        return lambda: None
    end_s = clock_s() + LONGEST_WAIT_S

    def show() -> None:
        if clock_s() < end_s:
            show_liveness()

    return show


def balanced_cost(config: Config) -> DocumentCost | None:
    """Return the cost of documents by which the samples of a step are dealt; None: not by the lengths of documents."""
    return document_cost(config.model) if config.data.balance == "cost" else None


def open_validation(config: Config) -> tuple[ValidationSet, ...]:
    """Open the sets of held-out data, in the order of the configuration, which may name none.

    Raises: DataError when files cannot be used or have too few tokens, and when two sets have the same content.
    """
    named = config.validation_sets
    prefixes = _prefixes(config, {key: one for key, one in named.items() if not one.has_pictures})
    metas = read_metas(prefixes)
    sets = tuple(
        _held_out_pictures(config, key, one)
        if one.has_pictures
        else _held_out_text(config, one.resolved_name, prefixes[key], metas[key])
        for key, one in named.items()
    )
    opened = (
        (key, one.path or one.pictures, found.digest) for (key, one), found in zip(named.items(), sets, strict=True)
    )
    _refuse_duplicates(opened, "remove one of them")
    return sets


def _held_out_text(config: Config, name: str, prefix: DataPath, meta: DataMeta | None) -> ValidationSet:
    check_vocabulary(prefix, meta, config.model.vocab_size)
    dataset, digest = open_dataset(prefix, config.model.vocab_size)
    seq_len = config.evaluation_seq_len
    num_available = num_windows(dataset, seq_len)
    order = WindowOrder(0, num_available, num_tokens=dataset.num_tokens)
    source = TrainingSource(StreamSource(name, dataset.num_tokens, digest), dataset, order)
    reader = held_out_reader(source, seq_len, config.data.has_document_mask)
    text_bytes = meta.validation.text_bytes if meta is not None and prefix.name == "validation" else None
    num_samples = config.evaluation.num_samples or num_available
    return ValidationSet(name, reader, min(num_samples, num_available), text_bytes, digest)


def _held_out_pictures(config: Config, key: str, named: ValidationSetConfig) -> ValidationSet:
    source = picture_source(config, key, named)
    assert isinstance(source.order, OnePieceOrder)
    num_available = source.order.num_samples
    replaces_bad_samples = config.data.bad_samples == "replace"
    reader = held_out_reader(
        source, config.evaluation_seq_len, config.data.has_document_mask, replaces_bad_samples=replaces_bad_samples
    )
    num_samples = config.evaluation.num_samples or num_available
    return ValidationSet(named.resolved_name, reader, min(num_samples, num_available), None, source.identity.digest)


def data_prefixes(config: Config) -> Mapping[str, DataPath]:
    """Return the prefixes of all token files: of sources and sets of held-out tokens by their keys.

    Raises: DataError when a URL has no driver, or the cache cannot be used.
    """
    named: dict[str, DataSourceConfig | ValidationSetConfig] = {**config.data_sources, **config.validation_sets}
    return _prefixes(config, {key: one for key, one in named.items() if not one.has_pictures})


def _prefixes(config: Config, named: Mapping[str, DataSourceConfig | ValidationSetConfig]) -> dict[str, DataPath]:
    cache = CacheSettings.of(config.data)
    return {key: path_or_url(one.path, cache) for key, one in named.items()}


def tokenizer_notes(config: Config) -> list[str]:
    """Return a note on the data sets whose tokenizer cannot be compared; none if there is no other tokenizer.

    Raises: DataError when a meta.json is unreadable.
    """
    prefixes = data_prefixes(config)
    unknown = {key: prefixes[key] for key, meta in read_metas(prefixes).items() if meta is None}
    if not unknown or (len(prefixes) == 1 and not config.data.tokenizer):
        return []
    named = ", ".join(f"{key}={str(prefix)!r}" for key, prefix in unknown.items())
    return [f"tokenizers that cannot be compared, because there is no {META_NAME} of this program beside them: {named}"]


def sample_stream(config: Config, reader: BatchReader, validation: Iterable[ValidationSet]) -> SampleStream:
    """Return the sample order of a new run. validation: all sets of held-out data.

    Must be called after `find_decoder` if there are pictures from shards.
    """
    tokenizer, shards = config.data.tokenizer, shards_of(reader)
    return SampleStream(
        config.resolved_data_seed,
        tuple(source.identity for source in reader.sources if source is not None),
        planned_stages(config),
        validation_digest=",".join(validation_set.digest for validation_set in validation),
        tokenizer_digest=tokenizer_digest(Path(tokenizer)) if tokenizer else "",
        pictures="" if shards is None else shards.made_by,
        packing=ALGORITHM if config.data.packing == "best_fit" else "",
        block_tokens=config.data.block_tokens,
        part_tokens=config.data.part_tokens,
    )


def planned_stages(config: Config) -> tuple[MixtureStage, ...]:
    """Return the stages of the mixture and of the sample length of a new run, from sample 0 on."""
    sources = config.data_sources.values()
    stages = [MixtureStage(0, integer_weights([source.weight for source in sources]), config.seq_len)]
    for placed in config.placed_stages:
        weights = stages[-1].weights
        if placed.stage.weights:
            of_name = placed.stage.weight_of
            weights = integer_weights([of_name.get(source.resolved_name, 0.0) for source in sources])
        elif not placed.changes_length:
            continue  # mixture and length stay the same
        stages.append(MixtureStage(placed.first_sample, weights, placed.seq_len))
    return tuple(stages)


def _refuse_duplicates(found: Iterable[tuple[str, DataPath | str, str]], hint: str) -> None:
    """Raise DataError if two of `found`, each (key, path, digest), have the same digest."""
    firsts: dict[str, tuple[str, DataPath | str]] = {}
    for key, path, digest in found:
        first_key, first = firsts.setdefault(digest, (key, path))
        if first_key != key:
            raise DataError(
                f"{key}={str(path)!r} has the same content as {first_key}={str(first)!r} (digest {digest}); {hint}"
            )
