"""The differences of two checkpoints: their manifests, their tensors, and the items whose values differ.

Loads no torch: items of equal boxes are compared by their digests. value_difference.py compares the values where the
two checkpoints were saved in different boxes, and computes by how much values differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.checkpoint.checked_files import ItemDigests, find_stored
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensor


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One of the two checkpoints of a comparison."""

    location: Location
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of the manifest that differs, such as "mesh.tp_size". Its value is None in a checkpoint that lacks it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that one checkpoint lacks (then its description is None), or whose shape or dtype differs."""

    key: str
    before: str | None
    after: str | None


def open_stored(location: Location) -> StoredCheckpoint:
    """Read a checkpoint's manifest and index.

    Raises: CheckpointError when manifest or index is damaged.
    """
    manifest = read_manifest(location)
    return StoredCheckpoint(location, manifest, find_stored(location, manifest).tensors)


def field_differences(before: StoredCheckpoint, after: StoredCheckpoint) -> list[FieldDifference]:
    """Return the fields in which the manifests differ, except the files."""
    ours, theirs = (dict(_fields("", _without_files(stored.manifest))) for stored in (before, after))
    return [
        FieldDifference(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def tensor_differences(before: StoredCheckpoint, after: StoredCheckpoint) -> list[TensorDifference]:
    """Return the tensors that are not in both checkpoints with the same shape and dtype."""
    found = []
    for key in dict.fromkeys([*before.tensors, *after.tensors]):
        ours, theirs = (_described(stored.tensors.get(key)) for stored in (before, after))
        if ours != theirs:
            found.append(TensorDifference(key, ours, theirs))
    return found


def comparable_keys(before: StoredCheckpoint, after: StoredCheckpoint) -> list[str]:
    """Return the tensors whose values can be compared."""
    return [key for key, tensor in before.tensors.items() if _described(tensor) == _described(after.tensors.get(key))]


class DigestComparison:
    """Finds the items whose values may differ, from the digests only."""

    def __init__(self, before: StoredCheckpoint, after: StoredCheckpoint) -> None:
        self._tensors = before.tensors, after.tensors
        self._digests = tuple(ItemDigests(stored.location, stored.manifest.files) for stored in (before, after))

    def doubtful_items(self, key: str) -> list[StoredItem]:
        """Return the items of the first checkpoint whose values are not known to be equal in the second.

        Raises: CheckpointError when a data file is damaged.
        """
        ours, theirs = (tensors[key].items for tensors in self._tensors)
        same_box = {(item.offsets, item.sizes): item for item in theirs}
        return [item for item in ours if not self._is_same(item, same_box.get((item.offsets, item.sizes)))]

    def _is_same(self, ours: StoredItem, theirs: StoredItem | None) -> bool:
        if theirs is None:
            return False
        first, second = self._digests[0].find(ours), self._digests[1].find(theirs)
        return first is not None and second is not None and first.digest == second.digest


def _without_files(manifest: Manifest) -> dict[str, Any]:
    values = {**asdict(manifest), "mesh": manifest.mesh.to_dict()}
    del values["files"]
    return values


def _fields(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _described(tensor: StoredTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
