"""Read the files of a checkpoint that hold no items, such as the index, and compare them with their digests.

COMMIT has the digest of the manifest, and the manifest has the digest of every file that it lists. So these files never
change. Checkpoints from before the index existed have only `.metadata`, a pickle that needs torch
(metadata_unpickler.py). The index that `megatrain ckpt index` makes from it is an additional file, which the manifest
does not list. Commands that load no torch use it. A job, and any command that reads tensors, uses only files that the
manifest lists. verification.py reads whole checkpoints, the items too.
"""

from __future__ import annotations

from megatrain.checkpoint.data_file import content_digest
from megatrain.checkpoint.index_file import CheckpointIndex
from megatrain.checkpoint.stored_tensors import StoredTensors, size_problem
from megatrain.contracts.checkpoint_files import INDEX_NAME, METADATA_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import Manifest


class TorchNeededError(CheckpointError):
    """A checkpoint has no index, and torch cannot be imported to read its `.metadata`. The files may be intact."""


def checked_content(directory: Location, manifest: Manifest, name: str) -> bytes:
    """Return the bytes of a file that holds no items, after a check against the manifest's digest.

    Raises: CheckpointError naming the file.
    """
    location = directory / name
    content = location.read()
    entry = manifest.files.get(name)
    if entry is None or entry.digest != content_digest(content):
        raise CheckpointError(f"{location}: differs from its entry in the manifest; it is damaged")
    return content


def checked_index(directory: Location, manifest: Manifest) -> bytes:
    """Return the index that the manifest lists, or one made from `.metadata` when the checkpoint has none.

    Raises: TorchNeededError; CheckpointError naming the file.
    """
    name = manifest.name_of(INDEX_NAME)
    if name in manifest.files:
        _check_size(directory / name)
        return checked_content(directory, manifest, name)
    return _index_of_metadata(directory, manifest)


def read_index(content: bytes, directory: Location, manifest: Manifest) -> StoredTensors:
    """Parse the index of a checkpoint.

    Raises: CheckpointError naming the file.
    """
    location = directory / manifest.name_of(INDEX_NAME)
    index = CheckpointIndex.decode(content, str(location))
    metadata = manifest.files.get(manifest.name_of(METADATA_NAME))
    if metadata is None or index.metadata_digest != metadata.digest:
        raise CheckpointError(f"{location}: belongs to another checkpoint; if the manifest does not list it, remove it")
    return index.stored


def find_stored(directory: Location, manifest: Manifest) -> StoredTensors:
    """Return the content of a checkpoint. Needs no torch when an index exists, whether or not the manifest lists it.

    Raises: TorchNeededError; CheckpointError naming the file.
    """
    location = directory / manifest.name_of(INDEX_NAME)
    if location.name in manifest.files or not location.exists():
        return read_index(checked_index(directory, manifest), directory, manifest)
    _check_size(location)
    return read_index(location.read(), directory, manifest)


def _index_of_metadata(directory: Location, manifest: Manifest) -> bytes:
    name = manifest.name_of(METADATA_NAME)
    try:
        from megatrain.checkpoint.metadata_unpickler import read_metadata
    except (ImportError, OSError) as error:
        raise TorchNeededError(
            f"{directory}: has no {INDEX_NAME}, and {name} is a pickle, which needs torch, and torch cannot be loaded "
            f"({error}); `megatrain ckpt index` writes the index on a machine that has torch"
        ) from error
    _check_size(directory / name)
    content = checked_content(directory, manifest, name)
    return CheckpointIndex(content_digest(content), read_metadata(content, str(directory / name))).encode()


def _check_size(location: Location) -> None:
    problem = size_problem(location.size() or 0)
    if problem is not None:
        raise CheckpointError(f"{location}: {problem}; it is damaged or forged")
