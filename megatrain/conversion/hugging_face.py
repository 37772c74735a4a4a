"""Converts a Hugging Face model directory to a checkpoint from which a job of any layout starts, and a checkpoint of
any layout to a Hugging Face model directory, with the checkpoint's tokenizer.

An imported checkpoint has weights, no moments, and step 0. Parameters are read whole, one after another, and split into
items when they are written. Each data file holds several parameters. Settings that a model directory does not have
(batch, learning rate) come from the job's own configuration; the manifest holds placeholders for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import checked_content
from megatrain.checkpoint.image import ImageItem, ImagePlan, key_of, plan_image
from megatrain.checkpoint.offline_writer import write_checkpoint
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.checkpoint_format.branches import MAIN_BRANCH
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import (
    SENTENCEPIECE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    is_sentencepiece,
)
from megatrain.checkpoint_format.data_file import data_file_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import CheckpointMesh, Manifest
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.checkpoint_format.stored_tensors import MASTER
from megatrain.config.batch import BatchConfig
from megatrain.config.config import Config
from megatrain.config.job import JobConfig
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.serialize import config_hash, section_toml
from megatrain.config.toml_text import value_text
from megatrain.config.train import TrainConfig
from megatrain.contracts.layout import Layout
from megatrain.conversion.software import current_versions, job_config
from megatrain.data.encoders import sentencepiece_encoder
from megatrain.data.end_of_document import end_of_document, files_beside, tokenizer_config
from megatrain.data.tokenizer import has_library_of, parse_tokenizer
from megatrain.hf import Dtype, ExportReport, HfModel, TokenizerFile, export_model, open_model
from megatrain.hf.tensor_map import parameter_shapes
from megatrain.hf.tokenizer_files import token_ids
from megatrain.parallel.boxes import Box
from megatrain.parallel.sharding import FlatShard

MODEL_TOML_NAME = "model.toml"
_FILE_BYTES = 4 << 30
"""Largest size of a data file, unless a single parameter is larger."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import. `toml`: the sections that a job's configuration needs to start from the checkpoint."""

    manifest: Manifest
    architecture: str
    num_parameters: int
    toml: str
    notes: tuple[str, ...]


def import_hf(source: Path, output: Location, *, file_bytes: int = _FILE_BYTES) -> ImportReport:
    """Write the model in `source` as a committed checkpoint to `output`.

    Raises: CheckpointError naming the file and the key or tensor; DataError for a tokenizer that cannot be used.
    """
    opened = open_model(source)
    toml = _toml(opened, output)
    small_files = {MODEL_TOML_NAME: toml.encode()}
    notes = opened.notes
    if opened.tokenizer is not None:
        files, note = _tokenizer_files(opened.tokenizer)
        small_files |= files
        notes += (note,)
    parameters = _OrderedParameters(opened)
    manifest = write_checkpoint(
        output,
        _manifest(opened),
        enumerate(_plans(opened, file_bytes)),
        parameters.data_of,
        lambda number: data_file_name(0, number),
        small_files,
    )
    return ImportReport(manifest, opened.architecture, opened.num_parameters, toml, notes)


def _tokenizer_files(tokenizer: Path) -> tuple[dict[str, bytes], str]:
    """Return the tokenizer's files for a checkpoint, and a note on the token that ends documents."""
    content = LocalLocation(tokenizer).read()
    name = SENTENCEPIECE_NAME if is_sentencepiece(tokenizer.name) else TOKENIZER_NAME
    if name == SENTENCEPIECE_NAME and not has_library_of(tokenizer):
        note = f"{tokenizer}: the token that ends documents is not known: install sentencepiece, and import again"
        return {name: content}, note
    end, source = end_of_document(_vocabulary(content, tokenizer), files_beside(tokenizer))
    if not end:
        note = (
            f"{tokenizer}: names no token that ends documents: name it with --eod in `data build` and `ckpt export-hf`"
        )
        return {name: content}, note
    files = {name: content, TOKENIZER_CONFIG_NAME: tokenizer_config(end).encode()}
    return files, f"documents end with {end} ({source})"


def _vocabulary(content: bytes, tokenizer: Path) -> Mapping[str, int]:
    if is_sentencepiece(tokenizer.name):
        return sentencepiece_encoder(content, str(tokenizer)).vocabulary()
    return token_ids(content, str(tokenizer))


class _OrderedParameters:
    """Provides the data of items in the order of the plans. The source has the parameters in the same order."""

    def __init__(self, opened: HfModel) -> None:
        # all parameters use the same memory: the first write to each new page would cost more than the conversion
        self._memory = torch.empty(max(math.prod(shape) for shape in parameter_shapes(opened.model).values()))
        self._parameters = opened.parameters(self._zeros)
        self._key = ""
        self._last = torch.empty(0)

    def data_of(self, item: ImageItem) -> Tensor:
        while self._key != item.key:
            name, self._last = next(self._parameters)
            self._key = key_of("master", name)
        return self._last[tuple(slice(at, at + size) for at, size in zip(item.offsets, item.sizes, strict=True))]

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self._memory[: math.prod(shape)].view(shape).zero_()


def _plans(opened: HfModel, file_bytes: int) -> Iterator[ImagePlan]:
    """Yield the image of each data file. The plans' tensors have no memory."""
    shards: list[tuple[str, FlatShard]] = []
    num_bytes = 0
    for name, shape in parameter_shapes(opened.model).items():
        tensor = torch.empty(shape, dtype=torch.float32, device="meta")
        if shards and num_bytes + tensor.nbytes > file_bytes:
            yield plan_image(shards)
            shards, num_bytes = [], 0
        shards.append(("master", FlatShard(name, shape, Box((0,) * len(shape), shape), tensor)))
        num_bytes += tensor.nbytes
    yield plan_image(shards)


def _manifest(opened: HfModel) -> Manifest:
    config = Config(
        job=JobConfig(name=f"import-{opened.architecture}"),
        model=opened.model,
        batch=BatchConfig(global_batch_size=1),
        train=TrainConfig(steps=1),
        optimizer=OptimizerConfig(lr=1.0),
    )
    return Manifest(
        job=config.job.name,
        branch=MAIN_BRANCH,
        round=0,
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        num_updates=0,
        num_skipped=0,
        written_unix_s=time.time(),
        has_optimizer=False,
        data=SampleStream(seed=0),
        mesh=CheckpointMesh(Layout(), num_chunks=1),
        config_hash=config_hash(config),
        config=config.to_dict(),
        versions=current_versions(),
        files={},
    )


def _toml(opened: HfModel, output: Location) -> str:
    # a job may be started from another directory
    location = str(output.path.absolute()) if isinstance(output, LocalLocation) else str(output)
    lines = [f"[checkpoint]\nload = {value_text(location)}", section_toml("model", opened.config)]
    if opened.tokenizer is not None:
        lines.insert(1, f"[data]\ntokenizer = {value_text(str(opened.tokenizer.absolute()))}")
    return "\n\n".join(lines) + "\n"


def export_hf(
    source: Location,
    output: Path,
    *,
    kind: str = MASTER,
    dtype: Dtype,
    max_shard_bytes: int,
    has_tokenizer: bool,
    end: str,
    is_forced: bool,
) -> ExportReport:
    """Write the master weights of the committed checkpoint `source`, in `dtype`, for transformers.

    `kind`: EMA for the moving average of the weights instead.
    `end`: the tokenizer's token that ends documents; "": the one that the tokenizer's files name.

    Raises: ConfigError when no family can represent the model; CheckpointError or DataError naming the file.
    """
    manifest = read_manifest(source)
    return export_model(
        # each parameter is read once
        partial(ParameterReader(source, manifest, kept_bytes=0).read_parameter, kind=kind),
        job_config(manifest, source).model,
        output,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer=_tokenizer(source, manifest, end) if has_tokenizer else None,
        is_forced=is_forced,
    )


def _tokenizer(source: Location, manifest: Manifest, end: str) -> TokenizerFile | None:
    def small_file(name: str) -> bytes | None:
        stored = manifest.name_of(name)
        return checked_content(source, manifest, stored) if stored in manifest.files else None

    for name in (TOKENIZER_NAME, SENTENCEPIECE_NAME):
        content = small_file(name)
        if content is not None:
            location = str(source / manifest.name_of(name))
            tokenizer = parse_tokenizer(content, location, end, small_file)
            pieces = tokenizer.vocabulary() if is_sentencepiece(name) else None
            return TokenizerFile(content, location, tokenizer.eod_id, pieces)
    return None
