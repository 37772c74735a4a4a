"""The files that make a directory a checkpoint: step-000000120/ with r000002-manifest-1a2b3c4d.json and, last, COMMIT.

All names except COMMIT contain the round, and the name of the manifest contains the digest of its content. So the
writer of a superseded round cannot change files that COMMIT covers (commit.py). A removal of a checkpoint removes
COMMIT before the files that it covers. PINNED keeps a checkpoint forever. WRITING is the first file of a checkpoint and
is removed after COMMIT was written: a directory with WRITING and no COMMIT was never complete. lineage.py decides which
checkpoint a job resumes from; megatrain.checkpoint stores tensors.
"""

from __future__ import annotations

import json
import time

from megatrain.checkpoint_format.checkpoint_names import (
    COMMIT_NAME,
    LATER_COMMIT_NAME,
    METADATA_NAME,
    PINNED_NAME,
    WRITING_NAME,
    is_manifest_name,
    manifest_name,
    step_of,
)
from megatrain.checkpoint_format.commit import check_round, is_committed, problem_of, read_commit
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.json_object import JsonObject

PINNED_SCHEMA_VERSION = 1


def check_writable(directory: Location, round_number: int, *, is_superseded: bool = False) -> None:
    """Refuse to write into a complete checkpoint, or through a link: files that COMMIT covers never change.

    is_superseded: the existing checkpoint was committed by a superseded round, and does not count.
    Raises: CheckpointError; also when a newer round has committed this checkpoint, so this process must stop.
    """
    if _is_link(directory):
        raise CheckpointError(f"{directory} is a symbolic link, and nothing is written through it; remove the link")
    commit = read_commit(directory)
    check_round(directory, commit, round_number)
    if not is_superseded and problem_of(directory, commit) is None:
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten; remove it first")


def manifest_location(directory: Location) -> Location:
    """Return the path of the manifest that COMMIT names; without a valid COMMIT, that of the newest round's manifest.

    Raises: MissingFileError when there is no manifest; CheckpointError when COMMIT cannot be read.
    """
    commit = read_commit(directory)
    if commit is not None:
        return directory / commit.manifest
    names = [entry.name for entry in directory.entries() if is_manifest_name(entry.name)]
    if not names:
        raise MissingFileError(f"{directory}: has no manifest (r<round>-manifest-<digest>.json)")
    return directory / max(names, key=_round_and_name)


def _round_and_name(name: str) -> tuple[int, str]:
    return int(name[1:].partition("-")[0]), name


def write_manifest(directory: Location, manifest: Manifest, *, is_superseded: bool = False) -> None:
    """Write the manifest atomically. is_superseded: as in `check_writable`.

    Raises: CheckpointError when it cannot be written, or as `check_writable` does.
    """
    check_writable(directory, manifest.round, is_superseded=is_superseded)
    content = manifest.to_json().encode()
    (directory / manifest_name(content, manifest.round)).write(content)


def read_manifest(directory: Location, *, job: str | None = None, branch: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint directory. `job` and `branch`, when given, must equal the manifest's.

    Raises: MissingFileError; CheckpointError when it is damaged, has another step than the directory's name, or is of
    another job or branch.
    """
    try:
        location = manifest_location(directory)
        content = location.read()
    except MissingFileError as error:
        raise MissingFileError(f"{error}; the checkpoint is incomplete") from error
    manifest = Manifest.from_json(content, str(location))
    if step_of(directory.name) not in (None, manifest.step):
        raise CheckpointError(
            f"{location}: step={manifest.step}, but the directory is {directory.name}; it was renamed"
        )
    for field, found, expected in (("job", manifest.job, job), ("branch", manifest.branch, branch)):
        if expected not in (None, found):
            raise CheckpointError(
                f"{location}: {field}={found!r}, expected {expected!r}; the checkpoint was copied here from another"
                f" {field}: move it out of this directory, or name it with checkpoint.load to start from it"
            )
    return manifest


def wrong_files(directory: Location, manifest: Manifest) -> list[str]:
    """Return a sentence for each file of the manifest that is missing or has another size."""
    problems: list[str] = []
    for name, entry in sorted(manifest.files.items()):
        location = directory / name
        size = location.size()
        if size is None:
            problems.append(f"{location}: missing, expected {entry.size} bytes")
        elif size != entry.size:
            problems.append(f"{location}: {size} bytes, expected {entry.size}")
    return problems


def expose_metadata(directory: Location, manifest: Manifest) -> None:
    """Copy the metadata of a committed checkpoint to `.metadata`, where torch's readers look for it.

    Raises: CheckpointError.
    """
    exposed, name = directory / METADATA_NAME, manifest.name_of(METADATA_NAME)
    if name != METADATA_NAME and name in manifest.files:
        content = (directory / name).read()
        if exposed.size() != len(content) or exposed.read() != content:
            exposed.write(content)


def is_unfinished(directory: Location) -> bool:
    """Return whether this checkpoint was begun but never complete. Then its removal loses no saved state.

    A checkpoint that was once complete has no WRITING. An empty directory counts as just begun.
    """
    if step_of(directory.name) is None or (directory / COMMIT_NAME).exists():
        return False
    if (directory / WRITING_NAME).exists():
        return True
    is_directory = directory.exists() and directory.size() is None
    return is_directory and not directory.entries()


def lacks_only_commit(directory: Location, branch: str) -> bool:
    """Return whether a checkpoint of `branch` lacks nothing except COMMIT, and has no mark of a write in progress.

    Such a checkpoint was complete once, and its COMMIT can be restored. So retention keeps it as long as a committed
    one. A checkpoint whose removal was interrupted just after COMMIT was removed has the same files, but retention
    still removes its step.
    Raises: CheckpointError when something cannot be looked up.
    """
    if (directory / COMMIT_NAME).exists() or is_unfinished(directory):
        return False
    try:
        manifest = read_manifest(directory, branch=branch)
    except CheckpointError:
        return False
    return not wrong_files(directory, manifest)


def remove_checkpoint(directory: Location) -> None:
    """Remove a checkpoint, complete or not. A partly removed one does not count as a checkpoint.

    Raises: CheckpointError when it is pinned or cannot be removed.
    """
    if is_pinned(directory):
        raise CheckpointError(f"{directory} is pinned and is kept; unpin it first")
    if _is_link(directory):
        # the link may lead out of the checkpoints: remove only the link
        directory.remove()
        return
    if (directory / COMMIT_NAME).exists():
        # a partly removed checkpoint must differ from one that was never complete
        (directory / WRITING_NAME).remove()
        for entry in directory.entries():
            if LATER_COMMIT_NAME.fullmatch(entry.name):
                entry.remove()
        (directory / COMMIT_NAME).remove()
    else:
        for entry in directory.entries():
            # keep WRITING until the end: a partly removed directory must still count as never complete
            if entry.name != WRITING_NAME:
                entry.remove()
    directory.remove()


def is_pinned(directory: Location) -> bool:
    """Return whether a checkpoint is kept forever. A damaged PINNED also counts."""
    return (directory / PINNED_NAME).exists()


def pin(directory: Location, reason: str) -> None:
    """Keep a checkpoint forever.

    Raises: CheckpointError when it is not committed or is just being removed, or PINNED cannot be written.
    """
    pinned = {"schema_version": PINNED_SCHEMA_VERSION, "reason": reason, "pinned_unix_s": time.time()}
    if not is_committed(directory):
        raise CheckpointError(f"{directory} is not a complete checkpoint (no matching COMMIT), so it cannot be pinned")
    (directory / PINNED_NAME).write((json.dumps(pinned, sort_keys=True) + "\n").encode())
    if not is_committed(directory):
        # a job's retention removed the checkpoint meanwhile: do not leave PINNED alone in the directory
        (directory / PINNED_NAME).remove()
        if not directory.entries():
            directory.remove()
        raise CheckpointError(f"{directory} was removed just now, so it cannot be pinned")


def pin_reason(directory: Location) -> str | None:
    """Return why a checkpoint is pinned, or None when it is not.

    Raises: CheckpointError when PINNED is damaged.
    """
    location = directory / PINNED_NAME
    try:
        content = location.read()
    except MissingFileError:
        return None
    damage = "the checkpoint stays pinned; pin it again or unpin it"
    return JsonObject.parse(content, str(location), PINNED_SCHEMA_VERSION, damage).text("reason")


def unpin(directory: Location) -> None:
    """Allow a checkpoint to be removed again. Does nothing for one that is not pinned."""
    (directory / PINNED_NAME).remove()


def _is_link(directory: Location) -> bool:
    """Return whether the directory is a link, which may lead to any file that this user may write."""
    return isinstance(directory, LocalLocation) and directory.path.is_symlink()
