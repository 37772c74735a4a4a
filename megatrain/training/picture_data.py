"""Opens the pictures of training and held-out data that a configuration names, and finds the decoder of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.data import DataSourceConfig
from megatrain.config.evaluation import ValidationSetConfig
from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.data.drawn_pictures import CAPTION_TOKENS, WORDS, DrawnPictures, drawn_source
from megatrain.data.pictures.decoders import decoder_identity
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producer_secret import read_secret
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.reader import BatchReader
from megatrain.data.training_source import TrainingSource


def picture_source(config: Config, key: str, named: DataSourceConfig | ValidationSetConfig) -> TrainingSource:
    """Return the source of pictures of a section of training or held-out data. Raises: DataError."""
    model, section, is_held_out = config.model, key.partition(".")[0], isinstance(named, ValidationSetConfig)
    picture_format = PictureFormat(model.picture_size, model.patch_size, config.pictures.max_pixels)
    if named.pictures == "shards":
        directory = Path(named.path if is_held_out else config.pictures.shards)
        samples = ShardSamples(directory, picture_format, Path(config.data.tokenizer))
        samples.check_tokenizer(model.vocab_size)
        return samples.source(named.resolved_name, config.resolved_data_seed, section, is_shuffled=not is_held_out)
    shortest = config.evaluation_seq_len if is_held_out else min(config.seq_lens)
    found, num_labels = f'{key}="drawn"', shortest - model.num_patches
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
    pictures = DrawnPictures(picture_format, config.resolved_data_seed, is_held_out)
    return drawn_source(named.resolved_name, pictures, section)


def shards_of(reader: BatchReader) -> ShardSamples | None:
    """Return the pictures from shards of a reader; None if there are none."""
    found = (source.pictures for source in reader.sources if source is not None)
    return next((pictures for pictures in found if isinstance(pictures, ShardSamples)), None)


def named_producers(config: Config) -> Producers:
    """Return the producers at pictures.addresses. Raises: DataError when their secret cannot be used."""
    return Producers(config.pictures.peers, read_secret(Path(config.pictures.secret)))


def find_decoder(config: Config, all_shards: Sequence[ShardSamples], *, has_begun: bool) -> None:
    """Find the decoder of pictures from shards, which is part of the sample order. Running producers report theirs.

    all_shards: of the training data and of held-out data. has_begun: whether the run has trained before, so that its
    addresses of producers are known to be right.
    Raises: DataError when the decoder is not installed, when the secret of running producers cannot be used, when they
    have other shards, or when none of them answers a run that has not begun; UnreachableError when none answers a run
    that has begun.
    """
    for shards in all_shards:
        if not config.pictures.peers:
            shards.decoder = decoder_identity(config.pictures.decoder)
            continue
        try:
            with shards.connect(named_producers(config)) as source:
                shards.decoder = source.decoder()
        except UnreachableError as error:
            if has_begun:
                raise
            raise DataError(
                f"pictures.addresses={config.pictures.addresses!r}: {error}. The run has not begun, so it ends and "
                "does not wait for the producers"
            ) from error
