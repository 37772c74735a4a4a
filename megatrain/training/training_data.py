"""Opens the training and held-out data that a configuration names, and describes the sample order for checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.config import Config
from megatrain.config.data import DataSourceConfig, integer_weights
from megatrain.config.evaluation import ValidationSetConfig
from megatrain.config.model_products import DocumentCost, document_cost
from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.data.block_cache import CacheSettings
from megatrain.data.costs import DocumentCosts
from megatrain.data.dataset import (
    check_same_tokenizer,
    check_tokenizer,
    check_vocabulary,
    data_digest,
    open_dataset,
    tokenizer_digest,
)
from megatrain.data.drawn_pictures import CAPTION_TOKENS, WORDS, DrawnPictures, drawn_source
from megatrain.data.held_out import num_evaluated
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import META_NAME, read_metas
from megatrain.data.mixture import Mixture
from megatrain.data.order import order_of
from megatrain.data.packing import ALGORITHM
from megatrain.data.parts import PartSizes
from megatrain.data.pictures.decoders import decoder_identity
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producer_secret import read_secret
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.reader import BatchReader
from megatrain.data.remote_path import DataPath, RemotePath, path_or_url
from megatrain.data.side_by_side import side_by_side
from megatrain.data.training_source import TrainingSource

LONGEST_WAIT_S = 900.0
"""Reads of object storage and requests to producers have failed by then: they are given up after a few minutes."""


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A set of held-out tokens, and how many samples of it an evaluation takes.

    `text_bytes`: the size of their text, None if it is unknown. `digest`: the digest of their content.
    """

    name: str
    dataset: IndexedDataset
    num_samples: int
    text_bytes: int | None
    digest: str


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
    opened: list[tuple[str, IndexedDataset, str]] = []

    def open_one(key: str) -> tuple[IndexedDataset, str]:
        check_vocabulary(prefixes[key], metas[key], config.model.vocab_size)
        dataset = open_dataset(prefixes[key], config.model.vocab_size, replaces_bad_samples=replaces_bad_samples)
        return dataset, data_digest(dataset)

    keys = [key for key, source in config.data_sources.items() if not source.has_pictures]
    # the blocks of one remote source are already fetched at the same time
    is_remote = any(isinstance(prefixes[key], RemotePath) for key in keys)
    found = dict(zip(keys, map(open_one, keys) if is_remote else side_by_side(open_one, keys), strict=True))
    for key, source in config.data_sources.items():
        if source.has_pictures:
            pictures = (_shard_source if source.pictures == "shards" else _drawn_source)(config, key, source)
            sources.append(replace(pictures, max_epochs=source.max_epochs))
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
        opened.append((f"{sources[-1].section}.path", dataset, identity.digest))
    _refuse_duplicates(opened, "use one source with the sum of their weights")
    has_mask = config.data.has_document_mask
    return BatchReader.of(sources, mixture, has_mask, replaces_bad_samples, balanced_cost(config))


def _drawn_source(config: Config, key: str, source: DataSourceConfig) -> TrainingSource:
    model, seed = config.model, config.resolved_data_seed
    found, num_labels = f'{key}="drawn"', min(config.seq_lens) - model.num_patches
    if model.vocab_size < len(WORDS):
        raise DataError(
            f"{found}: captions have {len(WORDS)} words, more than model.vocab_size={model.vocab_size}; "
            f"set model.vocab_size={len(WORDS)}"
        )
    if num_labels < CAPTION_TOKENS - 1:
        raise DataError(
            f"{found}: {model.num_patches} patches leave {num_labels} tokens of a sample for the "
            f"caption, which needs {CAPTION_TOKENS - 1}; use longer samples or larger patches"
        )
    pictures = DrawnPictures(model.picture_size, model.patch_size, seed)
    return drawn_source(source.resolved_name, pictures, key.partition(".")[0])


def _shard_source(config: Config, key: str, source: DataSourceConfig) -> TrainingSource:
    model, pictures = config.model, config.pictures
    picture_format = PictureFormat(model.picture_size, model.patch_size, pictures.max_pixels)
    samples = ShardSamples(Path(pictures.shards), picture_format, Path(config.data.tokenizer))
    samples.check_tokenizer(model.vocab_size)
    return samples.source(source.resolved_name, config.resolved_data_seed, key.partition(".")[0])


def shards_of(reader: BatchReader) -> ShardSamples | None:
    """Return the pictures from shards of a reader; None if there are none."""
    found = (source.pictures for source in reader.sources if source is not None)
    return next((pictures for pictures in found if isinstance(pictures, ShardSamples)), None)


def has_limited_waits(reader: BatchReader) -> bool:
    """Return whether each read that gets no answer fails after a while: those of object storage and of producers do.

    A read from a disk may never return.
    """
    opened = [source for source in reader.sources if source is not None]
    return all(
        source.dataset.cache_use is not None or isinstance(source.pictures, (ShardSamples, DrawnPictures))
        for source in opened
    )


def shown_wait(
    reader: BatchReader, show_liveness: Callable[[], None], clock_s: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    """Return what a rank calls while it waits for a step, so that it does not count as hung.

    It does nothing where a read may never return, and after LONGEST_WAIT_S: then something else than a read hangs.
    """
    if not has_limited_waits(reader):
        return lambda: None
    end_s = clock_s() + LONGEST_WAIT_S

    def show() -> None:
        if clock_s() < end_s:
            show_liveness()

    return show


def named_producers(config: Config) -> Producers:
    """Return the producers at pictures.addresses. Raises: DataError when their secret cannot be used."""
    return Producers(config.pictures.peers, read_secret(Path(config.pictures.secret)))


def find_decoder(config: Config, reader: BatchReader, *, has_begun: bool) -> None:
    """Find out what pictures from shards are decoded with, which is part of the sample order; ask running producers.

    has_begun: whether the run has trained before: its addresses have been right then.
    Raises: DataError when the decoder is not installed, the secret of running producers cannot be used, or they have
    other shards, or when none answers a run that has not begun; UnreachableError when none answers another run.
    """
    shards = shards_of(reader)
    if shards is None:
        return
    if not config.pictures.peers:
        shards.decoder = decoder_identity(config.pictures.decoder)
        return
    try:
        with shards.connect(named_producers(config)) as source:
            shards.decoder = source.decoder()
    except UnreachableError as error:
        if has_begun:
            raise
        raise DataError(
            f"pictures.addresses={config.pictures.addresses!r}: {error}. The run has not begun, so it ends and does "
            "not wait for the producers"
        ) from error


def balanced_cost(config: Config) -> DocumentCost | None:
    """Return the cost of documents by which the samples of a step are dealt; None: not by the lengths of documents."""
    return document_cost(config.model) if config.data.balance == "cost" else None


def open_validation(config: Config) -> tuple[ValidationSet, ...]:
    """Open the sets of held-out tokens, in the order of the configuration, which may name none.

    Raises: DataError when files cannot be used or have too few tokens, and when two sets have the same content.
    """
    sets = []
    prefixes = _prefixes(config, config.validation_sets)
    metas = read_metas(prefixes)
    for key, named in config.validation_sets.items():
        prefix, meta = prefixes[key], metas[key]
        check_vocabulary(prefix, meta, config.model.vocab_size)
        dataset = open_dataset(prefix, config.model.vocab_size)
        num_samples = num_evaluated(dataset, config.evaluation_seq_len, config.evaluation.num_samples)
        text_bytes = meta.validation.text_bytes if meta is not None and prefix.name == "validation" else None
        sets.append(ValidationSet(named.resolved_name, dataset, num_samples, text_bytes, data_digest(dataset)))
    found = zip(config.validation_sets, sets, strict=True)
    _refuse_duplicates(
        ((key, validation_set.dataset, validation_set.digest) for key, validation_set in found), "remove one of them"
    )
    return tuple(sets)


def data_prefixes(config: Config) -> Mapping[str, DataPath]:
    """Return the prefixes of all token files: of sources and sets of held-out tokens by their keys.

    Raises: DataError when a URL has no driver, or the cache cannot be used.
    """
    with_files = {key: source for key, source in config.data_sources.items() if not source.has_pictures}
    return _prefixes(config, {**with_files, **config.validation_sets})


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
    """Return the sample order of a new run. validation: all sets of held-out tokens.

    The decoder of pictures from shards is known (`find_decoder`).
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
            continue  # mixture and length go on
        stages.append(MixtureStage(placed.first_sample, weights, placed.seq_len))
    return tuple(stages)


def _refuse_duplicates(found: Iterable[tuple[str, IndexedDataset, str]], hint: str) -> None:
    """Raise DataError if two of `found`, each (key, tokens, digest), have the same digest."""
    firsts: dict[str, tuple[str, IndexedDataset]] = {}
    for key, dataset, digest in found:
        first_key, first = firsts.setdefault(digest, (key, dataset))
        if first is not dataset:
            raise DataError(
                f"{key}={str(dataset.prefix)!r} has the same content as {first_key}={str(first.prefix)!r} (digest "
                f"{digest}); {hint}"
            )
