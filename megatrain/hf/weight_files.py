"""The safetensors files of a model directory: which tensors are where, reading one at a time, writing a shard.

Pickle files are refused unread: loading one runs whatever code it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatrain.contracts.errors import CheckpointError, SaveError
from megatrain.hf.config_json import read_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def shard_name(number: int, num_shards: int) -> str:
    """Return the file name of shard `number`, counted from 1."""
    return SINGLE_NAME if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of one tensor. `name` is the name in the file; `dtype` is safetensors' word for it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a model directory by name, from the headers alone.

    Raises: CheckpointError naming the file that is missing, cut short or of another kind.
    """
    if (directory / SINGLE_NAME).exists():
        return _header(directory / SINGLE_NAME)
    if not (directory / INDEX_NAME).exists():
        raise _no_weights(directory)
    file_of = _read_index(directory / INDEX_NAME)
    headers = {name: _header(directory / name) for name in sorted(set(file_of.values()))}
    for tensor, file in file_of.items():
        if tensor not in headers[file]:
            raise CheckpointError(
                f"{directory / file}: holds no tensor {tensor}, but {INDEX_NAME} says so; fetch both files again"
            )
    for file, tensors in headers.items():
        for tensor in tensors:
            if file_of.get(tensor) != file:
                raise CheckpointError(
                    f"{directory / file}: holds the tensor {tensor}, but {INDEX_NAME} does not say so; fetch both files"
                    " again"
                )
    return {tensor: headers[file][tensor] for tensor, file in file_of.items()}


class WeightFiles:
    """Reads tensors of the files given to it; each file is mapped once, when first needed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, stored: StoredTensor) -> Tensor:
        """Return a tensor as it is stored.

        Raises: CheckpointError naming the file.
        """
        with _naming(stored.file):
            if stored.file not in self._open:
                opened = safe_open(stored.file, framework="pt", device="cpu")
                self._open[stored.file] = self._stack.enter_context(opened)
            tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        return tensor


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file without copying the tensors, which must be contiguous.

    Raises: SaveError naming the file.
    """
    try:
        path.touch()
        mode = path.stat().st_mode
        # readers refuse a file that does not say which framework's tensors it holds
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)  # the library renames a file that only its owner may read
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{path}: cannot be written: {error}; make room or choose another directory") from error


def _header(path: Path) -> dict[str, StoredTensor]:
    with _naming(path), safe_open(path, framework="pt", device="cpu") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  not a mapping
        return {
            name: StoredTensor(path, name, tuple(one.get_shape()), str(one.get_dtype())) for name, one in slices.items()
        }


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    section = read_object(path).section("weight_map")
    file_of = {tensor: section.text(tensor) for tensor in section.values}
    for tensor, file in file_of.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise section.refusal(tensor, "expected the name of a .safetensors file beside it")
    if not file_of:
        raise CheckpointError(f"{path}: names no tensor; fetch the file again")
    return file_of


def _no_weights(directory: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{directory / pickles[0]}: a pickle file, which can run code when it is loaded and is never read; convert "
            f"the model to safetensors (save_pretrained of transformers does)"
        )
    return CheckpointError(f"{directory}: holds neither {SINGLE_NAME} nor {INDEX_NAME}; fetch the model again")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong with it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file, although the model needs it; fetch it") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error


def index_json(file_of: Mapping[str, str], num_bytes: int) -> str:
    """Return the text of the index of a model in several files."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
