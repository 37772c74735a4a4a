"""Writes megatrain's parameters to a directory that transformers can load, on the CPU.

Memory holds one file's tensors and two parameters at a time. A thread reads the parameters in the order of the tensors
that are made of them. The directory appears when all files are on disk.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_CONFIG_NAME
from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import CheckpointError, SaveError
from megatrain.contracts.files.new_directory import DirectoryKind, new_directory
from megatrain.hf.families import family_for_export
from megatrain.hf.family import Family
from megatrain.hf.tensor_map import HfTensor, parameter_shapes
from megatrain.hf.tokenizer_files import TokenizerFile, special_tokens
from megatrain.hf.weight_files import INDEX_NAME, index_json, shard_name, write_shard

Dtype = Literal["fp32", "bf16", "fp16"]

_MODEL_DIRECTORY = DirectoryKind(
    re.compile(
        r"config\.json|generation_config\.json|tokenizer\.json|tokenizer\.model|tokenizer_config\.json"
        r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    ).fullmatch,
    "a model",
    "an export",
    "choose another directory",
    CheckpointError,
    SaveError,
)
_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export. `files`: names and sizes in bytes; `notes`: what the files cannot represent."""

    directory: Path
    architecture: str
    dtype: Dtype
    num_tensors: int
    num_parameters: int
    files: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]


def export_model(
    read_parameter: Callable[[str], Tensor],
    model: ModelConfig,
    directory: Path,
    *,
    dtype: Dtype,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: TokenizerFile | None = None,
    is_forced: bool = False,
) -> ExportReport:
    """Write `model` to `directory` for transformers: weights in `dtype`, config.json, and the tokenizer if given.

    read_parameter: returns one unsharded parameter, given megatrain's name; it is not called for a tied head. A tensor
    larger than max_shard_bytes gets a separate file. is_forced: replace an earlier export.
    Raises: ConfigError for a model that no family can represent; CheckpointError, which names the file or the tensor,
    also for a SentencePiece model that transformers would read with other token ids.
    """
    family = family_for_export(model)
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} must be positive; the default is 5 GB")
    special = special_tokens(tokenizer, model.vocab_size) if tokenizer is not None else None
    if tokenizer is not None:
        _check_loadable(tokenizer, family)
    tensors = tuple(family.tensors(model))
    notes = family.export_notes(model)
    torch_dtype = _TORCH_DTYPES[dtype]
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": str(torch_dtype).removeprefix("torch."),
        "use_cache": True,
        **family.write_config(model),
        # null if unknown, because the families' defaults are token ids of other vocabularies
        "pad_token_id": None,
        **(special.ids if special is not None else {"bos_token_id": None, "eos_token_id": None}),
    }
    with new_directory(directory, _MODEL_DIRECTORY, is_forced) as staging, ThreadPoolExecutor(1) as pool:
        parameters = _Parameters(read_parameter, parameter_shapes(model), tensors, pool)
        _write_weights(staging, tensors, parameters, torch_dtype, max_shard_bytes)
        _write_json(staging / "config.json", config)
        if tokenizer is not None and special is not None:
            (staging / tokenizer.file_name).write_bytes(tokenizer.content)
            _write_json(staging / TOKENIZER_CONFIG_NAME, special.tokenizer_config(model.seq_len))
            _write_json(staging / "generation_config.json", special.ids)
            notes += tokenizer.export_notes()
        else:
            notes.append("there is no tokenizer, so the exported model names no token for the end of a document")
        files = tuple((path.name, path.stat().st_size) for path in sorted(staging.iterdir()))
    return ExportReport(
        directory=directory,
        architecture=family.architecture,
        dtype=dtype,
        num_tensors=len(tensors),
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        files=files,
        notes=tuple(notes),
    )


def _check_loadable(tokenizer: TokenizerFile, family: Family) -> None:
    if tokenizer.pieces is not None and not family.has_free_tokenizer_class:
        raise CheckpointError(
            f"{tokenizer.location}: is a SentencePiece model, of which transformers makes other token ids for "
            f'model_type="{family.model_type}"; export with --no-tokenizer, and encode with the sentencepiece library '
            "and this file"
        )


def plan_shards(tensors: Sequence[HfTensor], item_bytes: int, max_shard_bytes: int) -> list[list[HfTensor]]:
    """Return the tensors of each file, in order. Each file is filled as far as max_shard_bytes allows."""
    shards: list[list[HfTensor]] = []
    free_bytes = 0
    for tensor in tensors:
        num_bytes = math.prod(tensor.shape) * item_bytes
        if not shards or num_bytes > free_bytes:
            shards.append([])
            free_bytes = max_shard_bytes
        shards[-1].append(tensor)
        free_bytes -= num_bytes
    return shards


class _Parameters:
    """Reads parameters with the caller's function in the order of the tensors: the next one while the current one is
    used.

    Keeps the last parameter, because the tensors made of it are usually adjacent. If they are not, it is read again.
    """

    def __init__(
        self,
        read: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        tensors: Iterable[HfTensor],
        pool: Executor,
    ) -> None:
        self._read = read
        self._shapes = shapes
        names = (tensor.parameter for tensor in tensors if tensor.ranges)
        self._remaining = (name for name, _ in itertools.groupby(names))
        self._pool = pool
        self._ahead = self._start()
        self._name = ""
        self._last = torch.empty(0)

    def read(self, name: str) -> Tensor:
        if name != self._name:
            self._last = torch.empty(0)  # free the last parameter before two others are in memory
            parameter = self._ahead.result().detach()
            self._ahead = self._start()
            if tuple(parameter.shape) != self._shapes[name]:
                raise CheckpointError(
                    f"{name} has shape {tuple(parameter.shape)}, this configuration requires {self._shapes[name]}; use "
                    f"the [model] section that it was trained with"
                )
            self._name, self._last = name, parameter
        return self._last

    def _start(self) -> Future[Tensor]:
        name = next(self._remaining, None)
        return Future() if name is None else self._pool.submit(self._read, name)


def _write_weights(
    directory: Path,
    tensors: Sequence[HfTensor],
    parameters: _Parameters,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    shards = plan_shards(tensors, dtype.itemsize, max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = shard_name(number, len(shards))
        write_shard(directory / file, {tensor.name: _make(tensor, parameters, dtype) for tensor in shard})
        file_of.update({tensor.name: file for tensor in shard})
    if len(shards) > 1:
        num_bytes = sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize
        (directory / INDEX_NAME).write_text(index_json(file_of, num_bytes), encoding="utf-8")


def _make(tensor: HfTensor, parameters: _Parameters, dtype: torch.dtype) -> Tensor:
    if not tensor.ranges:
        return torch.zeros(tensor.shape, dtype=dtype)
    made = torch.empty(tensor.shape, dtype=dtype)
    parameter = parameters.read(tensor.parameter)
    for theirs, ours in tensor.matching_views(made, parameter):
        theirs.copy_(ours)
    # bf16 has the range of fp32, fp16 a much smaller one; an infinity in the parameter itself is no overflow
    if dtype == torch.float16 and made.isinf().any() and not parameter.isinf().any():
        raise CheckpointError(
            f"{tensor.name}: holds values up to {parameter.abs().max().item():g}, beyond the range of fp16 (65504); "
            f"export bf16 or fp32"
        )
    return made


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
