"""The safetensors files of a model directory: finds tensors, reads them one at a time, and writes a file.

Pickle files are refused without reading them, because loading a pickle runs any code that it contains.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CheckpointError, SaveError
from megatrain.hf.config_json import read_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_NUM_OPEN_FILES = 2
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def shard_name(number: int, num_shards: int) -> str:
    """Return the file name of shard `number`, counted from 1."""
    return SINGLE_NAME if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One tensor in a file's header. `name` is the name in the file; `dtype` is the name that safetensors uses."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def find_tensors(directory: Path) -> dict[str, StoredWeight]:
    """Return every tensor of a model directory by name, reading only the headers.

    Raises: CheckpointError, which names the file that is missing, truncated or of another kind.
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
                f"{directory / file}: holds no tensor {tensor}, but {INDEX_NAME} lists it there; fetch both files again"
            )
    for file, tensors in headers.items():
        for tensor in tensors:
            if file_of.get(tensor) != file:
                raise CheckpointError(
                    f"{directory / file}: holds the tensor {tensor}, but {INDEX_NAME} does not list it there; fetch "
                    "both files again"
                )
    return {tensor: headers[file][tensor] for tensor, file in file_of.items()}


class WeightFiles(Closable):
    """Reads tensors from memory-mapped files. Only the two files that were used last stay open.

    A parameter may be made of tensors in two files. All files together may be larger than the memory.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, tuple[ExitStack, Any]] = OrderedDict()

    def close(self) -> None:
        while self._open:
            self._close_oldest()

    def read(self, stored: StoredWeight) -> Tensor:
        """Return a tensor in its stored shape and dtype.

        Raises: CheckpointError, which names the file.
        """
        with _naming(stored.file):
            if stored.file not in self._open:
                if len(self._open) == _NUM_OPEN_FILES:
                    self._close_oldest()
                stack = ExitStack()
                opened = stack.enter_context(safe_open(stored.file, framework="pt", device="cpu"))
                self._open[stored.file] = stack, opened
            self._open.move_to_end(stored.file)
            tensor: Tensor = self._open[stored.file][1].get_tensor(stored.name)
        return tensor

    def _close_oldest(self) -> None:
        stack, _ = self._open.popitem(last=False)[1]
        stack.close()


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file without copying the tensors, which must be contiguous.

    Raises: SaveError, which names the file.
    """
    try:
        path.touch()
        mode = path.stat().st_mode
        # readers refuse files without the name of a framework in their metadata
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)  # the library replaces the file by a file that only its owner may read
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{path}: cannot be written: {error}; free some space or choose another directory") from error


def _header(path: Path) -> dict[str, StoredWeight]:
    with _naming(path), safe_open(path, framework="pt", device="cpu") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  not a mapping
        return {
            name: StoredWeight(path, name, tuple(tensor.get_shape()), str(tensor.get_dtype()))
            for name, tensor in slices.items()
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
            f"{directory / pickles[0]}: a pickle file, which is never read, because loading it could run any code; "
            f"convert the model to safetensors (save_pretrained of transformers does)"
        )
    return CheckpointError(f"{directory}: holds neither {SINGLE_NAME} nor {INDEX_NAME}; fetch the model again")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of reading `path` into a CheckpointError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file, although the model needs it; fetch it") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file ({error}); fetch it again") from error


def index_json(file_of: Mapping[str, str], num_bytes: int) -> str:
    """Return the text of the index file for a model in several files."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
