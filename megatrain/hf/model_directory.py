"""Reads megatrain's parameters from a Hugging Face model directory, one at a time.

Opening a directory checks everything in config.json and in the files' headers. Weights are read later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint_format.checkpoint_names import SENTENCEPIECE_NAME, TOKENIZER_NAME
from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import CheckpointError
from megatrain.formatting import count_text, problems_text
from megatrain.hf.config_json import read_object
from megatrain.hf.families import read_config, section_of
from megatrain.hf.family import HEAD_NAME, Family
from megatrain.hf.tensor_map import HfTensor, parameter_shapes
from megatrain.hf.weight_files import StoredWeight, WeightFiles, find_tensors

_DTYPES = ("F32", "BF16", "F16")
_MAX_PROBLEMS = 5
_FIRST_BYTE_OF_PIECES = b"\x0a"
"""A SentencePiece model is a protobuf message that begins with its pieces, field 1. Other programs use the name
tokenizer.model for text files, such as tiktoken's lists of tokens in base64.
"""


@dataclass(frozen=True, slots=True)
class HfModel:
    """A checked model directory. `notes` lists what ModelConfig cannot represent.

    `tokenizer`: the path of its tokenizer.json, else of its SentencePiece model; None if there is none.
    """

    directory: Path
    architecture: str
    model: ModelConfig
    notes: tuple[str, ...]
    tokenizer: Path | None
    _tensors: Mapping[str, tuple[HfTensor, ...]] = field(repr=False)
    """The tensors that make up each of megatrain's parameters."""
    _stored: Mapping[str, StoredWeight] = field(repr=False)
    _tied_copy: tuple[StoredWeight, StoredWeight] | None = field(repr=False)
    """The word embedding and the head, if the files store a head although it is tied."""

    @property
    def config(self) -> dict[str, Any]:
        """The keys and values of the [model] section."""
        return section_of(self.model)

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters, with padding."""
        return sum(torch.Size(shape).numel() for shape in parameter_shapes(self.model).values())

    def parameters(self, zeros: Callable[[tuple[int, ...]], Tensor] = torch.zeros) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter with megatrain's name, unsharded and in fp32. Rows that pad the vocabulary are zero.

        zeros: returns the memory for a parameter, given its shape.
        Raises: CheckpointError, which names the file, also when a tied head differs from the embedding.
        """
        with WeightFiles() as files:
            if self._tied_copy is not None:
                _check_tied(*self._tied_copy, files)
            for name, shape in parameter_shapes(self.model).items():
                parameter = zeros(shape)
                for tensor in self._tensors[name]:
                    stored = files.read(self._stored[tensor.name])
                    for theirs, ours in tensor.matching_views(stored, parameter):
                        ours.copy_(theirs)
                yield name, parameter


def open_model(directory: Path) -> HfModel:
    """Check a directory with a model of a known family in safetensors files, and return the model, ready to be read.

    Raises: CheckpointError, which names the file, and the key or tensor that is missing, damaged, unknown or not
    supported by megatrain's model.
    """
    config = read_object(directory / "config.json")
    family, model, notes = read_config(config)
    stored = _by_full_name(find_tensors(directory), family)
    if model.num_layers > len(stored):
        raise CheckpointError(
            f"{config.location}: describes {count_text(model.num_layers, 'layer')}, but the files have only "
            f"{count_text(len(stored), 'tensor')}; fetch the model again"
        )
    tensors = tuple(family.tensors(model))
    problems = [*_problems(tensors, stored), *_unknown(tensors, stored, model)]
    if problems:
        raise CheckpointError(f"{directory} does not fit its config.json: {problems_text(problems, _MAX_PROBLEMS)}")
    made_of: dict[str, tuple[HfTensor, ...]] = defaultdict(tuple)
    for tensor in tensors:
        made_of[tensor.parameter] += (tensor,)
    tokenizer, more_notes = _find_tokenizer(directory)
    return HfModel(
        directory=directory,
        architecture=family.architecture,
        model=model,
        notes=(*notes, *more_notes),
        tokenizer=tokenizer,
        _tensors=dict(made_of),
        _stored=stored,
        _tied_copy=(stored[tensors[0].name], stored[HEAD_NAME])
        if model.has_tied_head and HEAD_NAME in stored
        else None,
    )


def _find_tokenizer(directory: Path) -> tuple[Path | None, list[str]]:
    """Return the tokenizer's file if megatrain can read it, and a note on a tokenizer.model that it cannot read."""
    path = directory / TOKENIZER_NAME
    if path.exists():
        return path, []
    path = directory / SENTENCEPIECE_NAME
    if not path.exists():
        return None, []
    try:
        with path.open("rb") as file:
            begin = file.read(1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if begin == _FIRST_BYTE_OF_PIECES:
        return path, []
    return None, [f"{path}: is not a SentencePiece model, and is left out; give its tokenizer.json with data.tokenizer"]


def _by_full_name(found: Mapping[str, StoredWeight], family: Family) -> dict[str, StoredWeight]:
    """Return the tensors by their names in a model with head, without those that megatrain's model does not have."""
    stored: dict[str, StoredWeight] = {}
    for stored_name, tensor in found.items():
        full_name = family.full_name(stored_name)
        if full_name in stored:
            raise CheckpointError(f"{tensor.file}: holds {full_name} under two names; fetch the model again")
        if not family.buffers.fullmatch(full_name):
            stored[full_name] = tensor
    return stored


def _problems(tensors: tuple[HfTensor, ...], stored: Mapping[str, StoredWeight]) -> Iterator[str]:
    for tensor in tensors:
        found = stored.get(tensor.name)
        if found is None:
            yield f"{tensor.name} {list(tensor.shape)} is missing"
        elif found.shape != tensor.shape:
            yield f"{found.file.name}: {tensor.name} has shape {list(found.shape)}, expected {list(tensor.shape)}"
        elif found.dtype not in _DTYPES:
            yield f"{found.file.name}: {tensor.name} is of type {found.dtype}, expected one of {', '.join(_DTYPES)}"


def _unknown(tensors: tuple[HfTensor, ...], stored: Mapping[str, StoredWeight], model: ModelConfig) -> Iterator[str]:
    known = {tensor.name for tensor in tensors} | ({HEAD_NAME} if model.has_tied_head else set())
    for name, tensor in stored.items():
        if name not in known:
            yield f"{tensor.file.name}: {tensor.name} belongs to no part of this model"


def _check_tied(embedding: StoredWeight, head: StoredWeight, files: WeightFiles) -> None:
    if not torch.equal(files.read(embedding), files.read(head)):
        raise CheckpointError(
            f"{head.file}: {head.name} differs from {embedding.name}, but config.json has tie_word_embeddings=true; "
            f"set tie_word_embeddings=false to import both"
        )
