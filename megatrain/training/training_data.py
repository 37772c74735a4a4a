"""Open the training data that a configuration names, and describe the sample order over them for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.config import Config
from megatrain.config.data import integer_weights
from megatrain.contracts.errors import DataError
from megatrain.data.dataset import check_same_tokenizer, check_tokenizer, data_digest, open_dataset, tokenizer_digest
from megatrain.data.indexed import IndexedDataset
from megatrain.data.mixture import Mixture
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader, TrainingSource


def open_reader(config: Config) -> BatchReader:
    """Return the reader of the training data, as a new run reads them.

    Raises: DataError when files cannot be used, do not belong to one tokenizer, to data.tokenizer or to the model,
    and when two sources have the same content.
    """
    prefixes = {key: Path(source.path) for key, source in config.data_sources.items()}
    with_validation = dict(prefixes)
    if config.data.validation:
        with_validation["data.validation"] = Path(config.data.validation)
    check_same_tokenizer(with_validation)
    if config.data.tokenizer:
        for prefix in with_validation.values():
            check_tokenizer(Path(config.data.tokenizer), prefix, config.model.vocab_size)
    sources = []
    for key, source in config.data_sources.items():
        dataset = open_dataset(prefixes[key], config.model.vocab_size)
        order = SampleOrder(dataset.num_tokens, config.model.seq_len, config.resolved_data_seed, source.path)
        identity = StreamSource(source.resolved_name, dataset.num_tokens, data_digest(dataset))
        sources.append(TrainingSource(identity, dataset, order, key.partition(".")[0], source.max_epochs))
    _refuse_twins(sources)
    mixture = Mixture(config.resolved_data_seed, (_first_stage(config),), len(sources))
    return BatchReader(tuple(sources), mixture, config.data.has_document_mask)


def sample_stream(config: Config, reader: BatchReader, validation: IndexedDataset | None) -> SampleStream:
    """Return the sample order of a new run. validation: the held-out tokens, if there are any."""
    tokenizer = config.data.tokenizer
    return SampleStream(
        config.resolved_data_seed,
        tuple(source.identity for source in reader.sources if source is not None),
        (_first_stage(config),),
        validation_digest=data_digest(validation) if validation is not None else "",
        tokenizer_digest=tokenizer_digest(Path(tokenizer)) if tokenizer else "",
    )


def _first_stage(config: Config) -> MixtureStage:
    return MixtureStage(0, integer_weights([source.weight for source in config.data_sources.values()]))


def _refuse_twins(sources: Sequence[TrainingSource]) -> None:
    firsts: dict[str, TrainingSource] = {}
    for source in sources:
        first = firsts.setdefault(source.identity.digest, source)
        if first is not source:
            raise DataError(
                f"{source.section}.path={str(source.dataset.prefix)!r} has the same content as {first.section}.path="
                f"{str(first.dataset.prefix)!r} (digest {source.identity.digest}); use one source with the sum of "
                "their weights"
            )
