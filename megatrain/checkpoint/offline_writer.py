"""A whole checkpoint written by one process, a data file at a time: what conversions leave behind.

The files are those that a job's hosts write: WRITING first, the same images and lists of items, manifest and COMMIT
last. An item is in memory at a time. What an earlier attempt left unfinished is replaced, anything else is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.checkpoint.data_file import ItemHasher, content_digest, encode_trailer, is_data_file_name, trailer_digest
from megatrain.checkpoint.envelope import envelope
from megatrain.checkpoint.image import ImageItem, ImagePlan, ItemsJson
from megatrain.checkpoint.metadata_file import metadata_bytes
from megatrain.checkpoint.metadata_reader import METADATA_NAME
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.contracts.checkpoint_files import (
    MANIFEST_NAME,
    WRITING_NAME,
    is_committed,
    write_commit,
    write_manifest,
)
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import FileEntry, Manifest

DataOf = Callable[[ImageItem], Tensor]
"""Returns the data of an item: a CPU tensor of its sizes and dtype."""


def write_checkpoint(
    directory: Location,
    manifest: Manifest,
    plans: Iterable[tuple[int, ImagePlan]],
    data_of: DataOf,
    file_name_of: Callable[[int], str],
    small_files: Mapping[str, bytes],
) -> Manifest:
    """Write a committed checkpoint of the planned images, a data file for each (number, plan); return its manifest.

    `manifest` says all but the files. `small_files` are written beside the data, as tokenizer.json.
    Raises: CheckpointError when the directory is taken or cannot be written, or the plans do not make a checkpoint.
    """
    _clear(directory, [*small_files, MANIFEST_NAME, METADATA_NAME, WRITING_NAME])
    WritingMark(manifest.incarnation, manifest.job, time.time()).write(directory)
    files: dict[str, FileEntry] = {}
    items: dict[int, ItemsJson] = {}
    for number, plan in plans:
        name = file_name_of(number)
        files[name] = write_image(directory / name, plan, data_of)
        items[number] = plan.items_json()
    for name, content in {**small_files, METADATA_NAME: metadata_bytes(items, file_name_of)}.items():
        (directory / name).write(content)
        files[name] = FileEntry(len(content), content_digest(content))
    complete = replace(manifest, files=files)
    write_manifest(directory, complete)
    write_commit(directory, complete)
    (directory / WRITING_NAME).remove()
    return complete


def write_image(location: Location, plan: ImagePlan, data_of: DataOf) -> FileEntry:
    """Write the data file of an image and return the manifest's entry for it.

    Raises: CheckpointError naming the file, which is gone then.
    """
    hasher = ItemHasher([(item.offset, item.length) for item in plan.items], plan.num_bytes, str(location))
    sink = location.create()
    try:
        at = 0
        for item in plan.items:
            around = envelope(item.sizes, item.dtype)
            data = data_of(item)
            assert (tuple(data.shape), data.dtype) == (item.sizes, item.dtype)
            view = memoryview(data.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            for part in (bytes(item.offset - at), around.prefix, view, around.suffix):
                hasher.update(part)
                sink.write(part)
            at = item.offset + item.length
        padding = bytes(plan.num_bytes - at)
        hasher.update(padding)
        trailer = encode_trailer(hasher.finish())
        sink.write(padding + trailer)
        sink.close()
    except BaseException:
        sink.abort()
        raise
    return FileEntry(plan.num_bytes + len(trailer), trailer_digest(trailer))


def _clear(directory: Location, own_names: Sequence[str]) -> None:
    """Remove what an earlier attempt left."""
    if is_committed(directory):
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten; choose another")
    if directory.size() is not None:
        raise CheckpointError(f"{directory} is a file; name a directory")
    entries = directory.entries()
    is_attempt = any(entry.name == WRITING_NAME for entry in entries)
    for entry in entries:
        if not is_attempt or (entry.name not in own_names and not is_data_file_name(entry.name)):
            raise CheckpointError(
                f"{directory} holds {entry.name}, which no conversion wrote; choose another directory"
            )
    for entry in entries:
        entry.remove()
