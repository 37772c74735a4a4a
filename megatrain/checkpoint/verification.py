"""Verify a whole checkpoint: compare every file with its digest, and the index with the items."""

from __future__ import annotations

from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from megatrain.checkpoint.checked_files import find_stored
from megatrain.checkpoint_format.checkpoint_files import manifest_location, read_manifest
from megatrain.checkpoint_format.checkpoint_names import INDEX_NAME, METADATA_NAME
from megatrain.checkpoint_format.commit import commit_problem
from megatrain.checkpoint_format.data_file import is_data_file, read_trailer, verify_file
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.contracts.errors import CheckpointError

_NUM_THREADS = 4
"""Files that are verified at the same time: hashing releases the interpreter lock."""


def verify_checkpoint(directory: Location, *, job: str | None = None, branch: str | None = None) -> list[str]:
    """Read a whole checkpoint and return its problems, each naming the file. An intact checkpoint has none.

    `job` and `branch`, when given, must equal the manifest's. A file that cannot be read is a problem too. Memory: a
    few blocks of 8 MiB, and the trailers.
    """
    try:
        manifest = read_manifest(directory, job=job, branch=branch)
        not_committed = commit_problem(directory)
    except CheckpointError as error:
        return [str(error)]
    problems = [not_committed] if not_committed is not None else []
    names = sorted(manifest.files)
    cancelled = Event()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            found = list(
                pool.map(lambda name: verify_file(directory / name, manifest.files[name], cancelled.is_set), names)
            )
        except BaseException:
            cancelled.set()  # after an interrupt, do not wait until files of many gigabytes are read
            raise
    problems += [problem for of_file in found for problem in of_file]
    damaged = {name for name, of_file in zip(names, found, strict=True) if of_file}
    return problems + _index_problems(directory, manifest, damaged)


def _index_problems(directory: Location, manifest: Manifest, damaged: Set[str]) -> list[str]:
    """Return the mismatches between the index and the files. `damaged` files are reported already."""
    files, index, metadata = manifest.files, manifest.name_of(INDEX_NAME), manifest.name_of(METADATA_NAME)
    if missing := [name for name in (index, metadata) if name not in files]:
        return [f"{manifest_location(directory)}: does not list {name}" for name in missing]
    if {index, metadata} & damaged:
        return []
    location = directory / index
    try:
        ranges_by_file = find_stored(directory, manifest).ranges_by_file()
        problems = [
            f"{location}: names {name}, which the manifest does not list" for name in ranges_by_file.keys() - files
        ]
        for name in (ranges_by_file.keys() & files) - damaged:
            size, has_items = files[name].size, is_data_file(files[name])
            items = read_trailer(directory / name, size).items if has_items else ()
            known = {(item.offset, item.length) for item in items}
            for offset, length in ranges_by_file[name]:
                if (offset, length) not in known if has_items else offset + length > size:
                    problems.append(
                        f"{location}: names bytes {offset} to {offset + length} of {name}, which are not an item"
                    )
    except CheckpointError as error:
        return [str(error)]
    return sorted(problems)
