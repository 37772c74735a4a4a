"""Join data directories, or pairs of token files, into one directory, in the order given.

Documents keep their order and their sequences. Joined directories must have the same tokenizer; for pairs without a
meta.json this cannot be checked.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_CONFIG_NAME
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.new_directory import new_directory
from megatrain.data.build import DATA_DIRECTORY, TRAIN, VALIDATION
from megatrain.data.dataset import check_same_tokenizer, tokenizer_beside
from megatrain.data.indexed import IndexedDataset
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.meta import META_NAME, DataMeta, SplitMeta, read_meta, read_metas
from megatrain.data.remote_path import DataPath
from megatrain.data.summary import entropy_nats, token_counts


def merge(inputs: Sequence[Path], output: Path, *, is_forced: bool = False) -> DataMeta | None:
    """Write the directory `output`, and return its meta.json; None for pairs, which become its `train`.

    inputs: data directories, or prefixes of pairs. is_forced: replace an earlier data directory.
    Raises: DataError when an input is damaged, both kinds are mixed, tokenizers differ, or `output` exists and must not
    be replaced.
    """
    are_directories = [path.is_dir() for path in inputs]
    if any(are_directories) and not all(are_directories):
        pair = inputs[are_directories.index(False)]
        raise DataError(f"{pair}: is not a directory, but other inputs are; give only directories or only prefixes")
    prefixes = [path / TRAIN for path in inputs] if all(are_directories) else list(inputs)
    named: dict[str, DataPath] = {f"input {number}": prefix for number, prefix in enumerate(prefixes, 1)}
    check_same_tokenizer(named, read_metas(named))
    with new_directory(output, DATA_DIRECTORY, is_forced) as staging:
        if not all(are_directories):
            _join(prefixes, staging / TRAIN)
            return None
        metas = [_meta_of(path) for path in inputs]
        tokenizer = tokenizer_beside(prefixes[0])
        for path in (tokenizer, inputs[0] / TOKENIZER_CONFIG_NAME):
            shutil.copyfile(path, staging / path.name)
        train = _joined_split([meta.train for meta in metas], prefixes, staging / TRAIN)
        held_out = [path / VALIDATION for path in inputs]
        validation = _joined_split([meta.validation for meta in metas], held_out, staging / VALIDATION)
        skipped: Counter[str] = Counter()
        for meta in metas:
            skipped.update(meta.skipped)
        merged = DataMeta(
            sources=tuple(source for meta in metas for source in meta.sources),
            text_key=metas[0].text_key if len({meta.text_key for meta in metas}) == 1 else None,
            seed=metas[0].seed,
            validation_fraction=validation.documents / (train.documents + validation.documents),
            vocab_size=metas[0].vocab_size,
            eod_id=metas[0].eod_id,
            tokenizer_sha256=metas[0].tokenizer_sha256,
            unigram_entropy_nats=entropy_nats(token_counts(IndexedDataset(staging / VALIDATION))),
            skipped=dict(skipped),
            train=train,
            validation=validation,
        )
        (staging / META_NAME).write_text(merged.to_json(), encoding="utf-8")
    return merged


def _meta_of(directory: Path) -> DataMeta:
    meta = read_meta(directory / META_NAME)
    if meta is None:
        raise DataError(
            f"{directory}: has no {META_NAME}, so it is not a data directory; give the prefixes of its .bin/.idx pairs"
        )
    return meta


def _joined_split(splits: Sequence[SplitMeta], prefixes: Sequence[Path], output: Path) -> SplitMeta:
    writer = _join(prefixes, output)
    return SplitMeta(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        text_bytes=sum(split.text_bytes for split in splits),
        bin_sha256=writer.bin_sha256,
        idx_sha256=writer.idx_sha256,
    )


def _join(prefixes: Sequence[Path], output: Path) -> IndexedWriter:
    """Write all documents of the pairs; the id type is the smallest one that can hold the id types of all pairs."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    dtype = np.result_type(*(dataset.dtype for dataset in datasets)).newbyteorder("<")
    with IndexedWriter(output, dtype) as writer:
        for dataset in datasets:
            writer.add_all(dataset)
    return writer
