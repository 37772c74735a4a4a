"""Writes a whole checkpoint in one process, for conversions.

The files are those that a job's hosts write: WRITING first, the same images and trailers, manifest and COMMIT last. The
caller appends data in the order of the image, so memory holds only a few blocks and the appended part. Files of an
earlier unfinished attempt are replaced; any other file in the directory is an error. An attempt that fails removes its
files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.checkpoint.block_writer import BlockThreads, BlockWriter
from megatrain.checkpoint.envelope import envelope
from megatrain.checkpoint.gathered_items import stored_by_ranks
from megatrain.checkpoint.image import ImageItem, ImagePlan, ItemsJson
from megatrain.checkpoint.metadata_file import describing_files
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.checkpoint_format.checkpoint_files import write_manifest
from megatrain.checkpoint_format.checkpoint_names import INDEX_NAME, METADATA_NAME, WRITING_NAME, is_manifest_name
from megatrain.checkpoint_format.commit import is_committed, write_commit
from megatrain.checkpoint_format.data_file import (
    ItemHasher,
    content_digest,
    encode_trailer,
    is_data_file_name,
    trailer_digest,
)
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry, Manifest
from megatrain.contracts.errors import CheckpointError, SaveError

DataOf = Callable[[ImageItem], Tensor]
"""Returns the data of an item: a CPU tensor of its sizes and dtype."""


class ImageFile:
    """The data file of an image, while it is being written. The caller finishes it with `close` or `abort`."""

    def __init__(self, location: Location, plan: ImagePlan, threads: BlockThreads) -> None:
        """Raises: SaveError naming the file."""
        self.plan = plan
        self.entry: FileEntry | None = None
        """The manifest's entry, after the file is closed."""
        self._hasher = ItemHasher([(item.offset, item.length) for item in plan.items], plan.num_bytes, str(location))
        with _saving():
            self._sink = location.create()
        self._writer = BlockWriter(self._hasher, self._sink, threads)
        self._at = 0
        self._number = 0
        self._num_data_bytes = 0
        """Bytes written of the current item's data."""

    def append(self, data: Tensor) -> None:
        """Write the next elements of the image's items, in row-major order: an item, or a part of one.

        Raises: SaveError naming the file.
        """
        item = self.plan.items[self._number]
        around = envelope(item.sizes, item.dtype)
        if self._num_data_bytes == 0:
            self._put(bytes(item.offset - self._at))
            self._put(around.prefix)
        assert data.dtype == item.dtype
        self._put(data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._num_data_bytes += data.nbytes
        assert self._num_data_bytes <= around.num_data_bytes
        if self._num_data_bytes == around.num_data_bytes:
            self._put(around.suffix)
            self._number += 1
            self._num_data_bytes = 0

    def close(self) -> FileEntry:
        """Complete the file, make it durable, and return the manifest's entry for it.

        Raises: SaveError naming the file; the file is removed then.
        """
        assert self._number == len(self.plan.items)
        self._put(bytes(self.plan.num_bytes - self._at))
        with _saving():
            self._writer.finish()
        trailer = encode_trailer(self._hasher.finish())
        with _saving():
            self._sink.write(trailer)
            self._sink.close()
        self.entry = FileEntry(self.plan.num_bytes + len(trailer), trailer_digest(trailer))
        return self.entry

    def abort(self) -> None:
        """Remove the file. After `close` or another `abort`, this does nothing."""
        self._writer.abandon()
        self._sink.abort()

    def _put(self, part: bytes | memoryview) -> None:
        with _saving():
            self._writer.put(part)
        self._at += len(part)


class NewCheckpoint:
    """A checkpoint that `new_checkpoint` will commit. `manifest` lists the files after the commit."""

    def __init__(
        self, directory: Location, manifest: Manifest, file_name_of: Callable[[int], str], threads: BlockThreads
    ) -> None:
        self.manifest = manifest
        self._threads = threads
        self._directory = directory
        self._file_name_of = file_name_of
        self._files: dict[int, ImageFile] = {}

    def create(self, number: int, plan: ImagePlan) -> ImageFile:
        """Begin data file `number`. It must be closed before the checkpoint is committed.

        Raises: SaveError naming the file.
        """
        self._files[number] = file = ImageFile(self._directory / self._file_name_of(number), plan, self._threads)
        return file

    def commit(self, small_files: Mapping[str, bytes]) -> None:
        """Write all files except the data files, COMMIT last.

        Raises: SaveError; CheckpointError when the images do not form a complete checkpoint.
        """
        entries: dict[str, FileEntry] = {}
        items: dict[int, ItemsJson] = {}
        for number, file in self._files.items():
            assert file.entry is not None
            entries[self._file_name_of(number)] = file.entry
            items[number] = file.plan.items_json()
        contents = {**small_files, **describing_files(stored_by_ranks(items, self._file_name_of))}
        entries |= {name: FileEntry(len(content), content_digest(content)) for name, content in contents.items()}
        self.manifest = replace(self.manifest, files=entries)
        with _saving():
            for name, content in contents.items():
                (self._directory / name).write(content)
            write_manifest(self._directory, self.manifest)
            write_commit(self._directory, self.manifest)

    def abort(self) -> None:
        """Remove the data files that are not closed."""
        for file in self._files.values():
            file.abort()


@contextmanager
def new_checkpoint(
    directory: Location,
    manifest: Manifest,
    file_name_of: Callable[[int], str],
    small_files: Mapping[str, bytes],
) -> Iterator[NewCheckpoint]:
    """Yield a checkpoint to fill with data files, and commit it at the end of the block.

    `manifest` has everything except the files. `small_files` are further files to write, such as tokenizer.json. An
    error removes everything that was written, as far as storage permits.

    Raises: CheckpointError when the directory is in use, or when the images do not form a complete checkpoint;
    SaveError when it cannot be written.
    """
    had_directory = directory.exists()
    _clear(directory, [*small_files, METADATA_NAME, INDEX_NAME, WRITING_NAME])
    with closing(BlockThreads()) as threads:
        checkpoint = NewCheckpoint(directory, manifest, file_name_of, threads)
        try:
            with _saving():
                WritingMark(manifest.round, manifest.job, time.time()).write(directory)
            yield checkpoint
            checkpoint.commit(small_files)
        except BaseException:
            checkpoint.abort()
            with suppress(CheckpointError):
                _remove_attempt(directory, had_directory=had_directory)
            raise
    (directory / WRITING_NAME).remove()


def write_checkpoint(
    directory: Location,
    manifest: Manifest,
    plans: Iterable[tuple[int, ImagePlan]],
    data_of: DataOf,
    file_name_of: Callable[[int], str],
    small_files: Mapping[str, bytes],
) -> Manifest:
    """Write a committed checkpoint of the planned images, one data file after the other. Returns its manifest.

    Memory holds one item at a time. Parameters and errors: see `new_checkpoint`.
    """
    with new_checkpoint(directory, manifest, file_name_of, small_files) as checkpoint:
        for number, plan in plans:
            file = checkpoint.create(number, plan)
            for item in plan.items:
                file.append(data_of(item))
            file.close()
    return checkpoint.manifest


@contextmanager
def _saving() -> Iterator[None]:
    """Turn a CheckpointError into a SaveError: errors of writing and of reading have different exit codes."""
    try:
        yield
    except CheckpointError as error:
        raise SaveError(str(error)) from error


def _clear(directory: Location, own_names: Sequence[str]) -> None:
    """Remove the files of an earlier unfinished attempt."""
    if is_committed(directory):
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten; choose another")
    if directory.size() is not None:
        raise CheckpointError(f"{directory} is a file; name a directory")
    entries = directory.entries()
    is_attempt = any(entry.name == WRITING_NAME for entry in entries)
    for entry in entries:
        is_own = entry.name in own_names or is_data_file_name(entry.name) or is_manifest_name(entry.name)
        if not is_attempt or not is_own:
            raise CheckpointError(
                f"{directory} holds {entry.name}, which is not the output of a conversion; choose another directory"
            )
    _remove(entries)


def _remove_attempt(directory: Location, *, had_directory: bool) -> None:
    if is_committed(directory):
        return  # writing COMMIT raised an error, but the file is there: a committed checkpoint must not be removed
    if not had_directory:
        directory.remove()
        return
    _remove(directory.entries())


def _remove(entries: Iterable[Location]) -> None:
    """Remove files, WRITING last: while it exists, the rest still counts as an attempt."""
    for entry in sorted(entries, key=lambda entry: entry.name == WRITING_NAME):
        entry.remove()
