"""A directory of a Hugging Face model as a source of our parameters, one at a time.

Everything is checked from config.json and the files' headers when the directory is opened; weights are read later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import CheckpointError
from megatrain.hf.config_json import read_object
from megatrain.hf.families import family_of, read_model, section_of
from megatrain.hf.family import Family
from megatrain.hf.tensor_map import HfTensor, our_shapes
from megatrain.hf.tokenizer_files import TOKENIZER_NAME
from megatrain.hf.weight_files import StoredTensor, WeightFiles, find_tensors

HEAD_NAME = "lm_head.weight"
_DTYPES = ("F32", "BF16", "F16")
_MAX_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model directory that was checked. `notes` says what our configuration does not; `tokenizer` may be absent."""

    directory: Path
    architecture: str
    model: ModelConfig
    notes: tuple[str, ...]
    tokenizer: Path | None
    _tensors: Mapping[str, tuple[HfTensor, ...]] = field(repr=False)
    """What each of our parameters is made of."""
    _stored: Mapping[str, StoredTensor] = field(repr=False)
    _tied_copy: tuple[StoredTensor, StoredTensor] | None = field(repr=False)
    """The word embedding and a head that is stored although it is tied."""

    @property
    def config(self) -> dict[str, Any]:
        """The keys and values of our [model] section."""
        return section_of(self.model)

    @property
    def num_parameters(self) -> int:
        """Elements of all our parameters, padding included."""
        return sum(torch.Size(shape).numel() for shape in our_shapes(self.model).values())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by our name, whole and in fp32; rows that pad the vocabulary are zero.

        Raises: CheckpointError naming the file, or a tied head that differs from the embedding.
        """
        with WeightFiles() as files:
            if self._tied_copy is not None:
                _check_tied(*self._tied_copy, files)
            for name, shape in our_shapes(self.model).items():
                parameter = torch.zeros(shape, dtype=torch.float32)
                for tensor in self._tensors[name]:
                    stored = files.read(self._stored[tensor.name])
                    for theirs, ours in tensor.matching_views(stored, parameter):
                        ours.copy_(theirs)
                yield name, parameter


def open_model(directory: Path) -> HfModel:
    """Check a directory with a Llama or GPT-2 model in safetensors files, and return it ready to be read.

    Raises: CheckpointError naming the file and the key or tensor that is missing, damaged, unknown or not expressible.
    """
    config = read_object(directory / "config.json")
    family = family_of(config)
    model = read_model(family, config)
    stored = _by_full_name(find_tensors(directory), family)
    if model.num_layers > len(stored):
        raise CheckpointError(
            f"{config.place}: describes {model.num_layers} layers, but there are {len(stored)} tensors in all; fetch "
            f"the model again"
        )
    tensors = tuple(family.tensors(model))
    problems = [*_problems(tensors, stored), *_unknown(tensors, stored, model)]
    if problems:
        more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(problems[:_MAX_PROBLEMS])}{more}")
    made_of: dict[str, tuple[HfTensor, ...]] = defaultdict(tuple)
    for tensor in tensors:
        made_of[tensor.parameter] += (tensor,)
    tokenizer = directory / TOKENIZER_NAME
    return HfModel(
        directory=directory,
        architecture=family.architecture,
        model=model,
        notes=tuple(family.import_notes(config)),
        tokenizer=tokenizer if tokenizer.exists() else None,
        _tensors=dict(made_of),
        _stored=stored,
        _tied_copy=(stored[tensors[0].name], stored[HEAD_NAME])
        if model.has_tied_head and HEAD_NAME in stored
        else None,
    )


def _by_full_name(found: Mapping[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """Name tensors as the model with its head does, without the constants that some files hold."""
    stored: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        full_name = name if name.startswith(family.prefix) or name == HEAD_NAME else family.prefix + name
        if full_name in stored:
            raise CheckpointError(f"{tensor.file}: holds {full_name} under two names; fetch the model again")
        if not family.buffers.fullmatch(full_name):
            stored[full_name] = tensor
    return stored


def _problems(tensors: tuple[HfTensor, ...], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    for tensor in tensors:
        found = stored.get(tensor.name)
        if found is None:
            yield f"{tensor.name} {list(tensor.shape)} is missing"
        elif found.shape != tensor.shape:
            yield f"{found.file.name}: {tensor.name} has shape {list(found.shape)}, expected {list(tensor.shape)}"
        elif found.dtype not in _DTYPES:
            yield f"{found.file.name}: {tensor.name} is of type {found.dtype}, expected one of {', '.join(_DTYPES)}"


def _unknown(tensors: tuple[HfTensor, ...], stored: Mapping[str, StoredTensor], model: ModelConfig) -> Iterator[str]:
    known = {tensor.name for tensor in tensors} | ({HEAD_NAME} if model.has_tied_head else set())
    for name, tensor in stored.items():
        if name not in known:
            yield f"{tensor.file.name}: {tensor.name} belongs to no part of this model"


def _check_tied(embedding: StoredTensor, head: StoredTensor, files: WeightFiles) -> None:
    if not torch.equal(files.read(embedding), files.read(head)):
        raise CheckpointError(
            f"{head.file}: {head.name} differs from {embedding.name}, but config.json says tie_word_embeddings=true; "
            f"say false there to import both"
        )
