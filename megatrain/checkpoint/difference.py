"""The differences of two checkpoints: their manifests, their tensors, and the items whose values differ.

Loads no torch: items of equal boxes are compared by their digests. By how much values differ, and whether they do where
the two were saved in other boxes, is value_difference.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.checkpoint.item_digests import ItemDigests
from megatrain.checkpoint.metadata_reader import StoredItem, StoredTensor, load_metadata
from megatrain.contracts.checkpoint_files import METADATA_NAME, read_manifest
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint that is compared."""

    place: Location
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of the manifest, as "mesh.tp_size", that differs. None: one of the two lacks it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that only one has (the other's description is None), or that has another shape or type."""

    key: str
    before: str | None
    after: str | None


def open_stored(place: Location) -> Stored:
    """Read what a checkpoint says of itself.

    Raises: CheckpointError when manifest or metadata is damaged.
    """
    manifest = read_manifest(place)
    return Stored(place, manifest, load_metadata(place, manifest.name_of(METADATA_NAME)).tensors)


def field_differences(before: Stored, after: Stored) -> list[FieldDifference]:
    """Return what differs in the manifests, the files aside."""
    ours, theirs = (dict(_fields("", _without_files(one.manifest))) for one in (before, after))
    return [
        FieldDifference(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def tensor_differences(before: Stored, after: Stored) -> list[TensorDifference]:
    """Return the tensors that are not in both in one shape and type."""
    found = []
    for key in dict.fromkeys([*before.tensors, *after.tensors]):
        ours, theirs = (_described(one.tensors.get(key)) for one in (before, after))
        if ours != theirs:
            found.append(TensorDifference(key, ours, theirs))
    return found


def comparable_keys(before: Stored, after: Stored) -> list[str]:
    """Return the tensors whose values can be compared."""
    return [key for key, one in before.tensors.items() if _described(one) == _described(after.tensors.get(key))]


class DigestComparison:
    """Tells where values may differ, from the digests alone."""

    def __init__(self, before: Stored, after: Stored) -> None:
        self._tensors = before.tensors, after.tensors
        self._digests = tuple(ItemDigests(one.place, one.manifest.files) for one in (before, after))

    def doubtful_items(self, key: str) -> list[StoredItem]:
        """Return those items of the first checkpoint whose values are not known to be the same in the second.

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
