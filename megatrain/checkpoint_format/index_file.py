"""The index of a checkpoint: its tensors and the file and range of each box, as JSON that can be read without torch.

    {"schema_version": 1,
     "metadata": "sha256:<hex>",
     "files": ["r000002-rank-00000.distcp"],
     "tensors": {"model.norm": {"dtype": "float32", "shape": [4, 6], "items": [0, 128, 1000, 0, 0, 4, 6]}}}

`items` has the items of a tensor one after the other: the number of the file, offset and length in it, then the offsets
and the sizes of the box, each with one number per dim of the shape. It is one flat list, because 12,288 ranks have half
a million items, and a list for each would take most of the time and memory. `metadata` is the digest of the
`.metadata` file, which describes the same content to torch's readers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from megatrain.checkpoint_format.stored_tensors import (
    TOO_LARGE,
    StoredItem,
    StoredTensor,
    StoredTensors,
    shown,
    size_problem,
)
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject

INDEX_SCHEMA_VERSION = 1
_DAMAGE = "the index is damaged or forged"
_PLACE_FIELDS = 3
"""Numbers of an item before its box: file, offset, length."""


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """A checkpoint's content. `metadata_digest`: the manifest's digest of the `.metadata` with the same content."""

    metadata_digest: str
    stored: StoredTensors

    def encode(self) -> bytes:
        """Return the content of the file."""
        files = self.stored.files()
        numbers = {file: number for number, file in enumerate(files)}
        raw = {
            "schema_version": INDEX_SCHEMA_VERSION,
            "metadata": self.metadata_digest,
            "files": files,
            "tensors": {key: _tensor_json(tensor, numbers) for key, tensor in self.stored.tensors.items()},
        }
        return (json.dumps(raw, separators=(",", ":")) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes, location: str) -> Self:
        """Parse the content of an index file; `location` names the file in errors.

        Raises: CheckpointError naming the file and the field.
        """
        _check(size_problem(len(content)), location)
        reader = _IndexObject.parse(content, location, INDEX_SCHEMA_VERSION, _DAMAGE)
        reader.check_known(("schema_version", "metadata", "files", "tensors"))
        stored = reader.stored()
        _check(stored.problem(), location)
        return cls(reader.text("metadata"), stored)


def _check(problem: str | None, location: str) -> None:
    if problem is not None:
        raise CheckpointError(f"{location}: {problem}; {_DAMAGE}")


def _tensor_json(tensor: StoredTensor, numbers: dict[str, int]) -> dict[str, Any]:
    items: list[int] = []
    for item in tensor.items:
        items += (numbers[item.file], item.offset, item.length, *item.offsets, *item.sizes)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "items": items}


class _IndexObject(JsonObject):
    """The JSON of an index."""

    def stored(self) -> StoredTensors:
        files = self._raw.get("files")
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise self.error("files", "expected a list of file names")
        return StoredTensors({key: self._tensor(key, raw, files) for key, raw in self.mapping("tensors").items()})

    def _tensor(self, key: str, raw: Any, files: list[str]) -> StoredTensor:
        if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "items"} or not isinstance(raw["dtype"], str):
            raise self._item_error(key, "expected an object with dtype, shape and items")
        shape, items = (self._numbers(key, raw[name]) for name in ("shape", "items"))
        num_dims = len(shape)
        stride = _PLACE_FIELDS + 2 * num_dims
        if len(items) % stride or max(items[::stride], default=-1) >= len(files):
            raise self._item_error(
                key, f"expected {stride} numbers for each item, the first of them the number of a listed file"
            )
        return StoredTensor(
            key,
            raw["dtype"],
            tuple(shape),
            tuple(
                StoredItem(
                    tuple(items[at + _PLACE_FIELDS : at + _PLACE_FIELDS + num_dims]),
                    tuple(items[at + _PLACE_FIELDS + num_dims : at + stride]),
                    files[items[at]],
                    items[at + 1],
                    items[at + 2],
                )
                for at in range(0, len(items), stride)
            ),
        )

    def _numbers(self, key: str, raw: Any) -> list[int]:
        # check whole lists at once: an index has millions of numbers
        if not isinstance(raw, list) or set(map(type, raw)) - {int}:
            raise self._item_error(key, "expected a list of integers")
        if raw and not 0 <= min(raw) <= max(raw) < TOO_LARGE:
            raise self._item_error(key, "expected integers of at least 0 and below 2^63")
        return raw

    def _item_error(self, key: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self._location}: {shown(key)}: {rule}; {_DAMAGE}")
