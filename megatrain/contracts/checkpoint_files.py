"""The files that make a directory a checkpoint: step-000000120/ with manifest.json and, last of all, COMMIT.

A checkpoint exists when its COMMIT does: it appears after everything else is in place, and repeats the checksum of the
manifest it vouches for. It is the first to go when a checkpoint is removed. PINNED keeps a checkpoint for ever. WRITING
is the first file of a checkpoint and goes after COMMIT: a directory with WRITING and no COMMIT was never complete.
Which of several checkpoints a job goes on from is lineage.py's, how tensors are stored is megatrain.checkpoint's.
"""

from __future__ import annotations

import json
import re
import time
import zlib

from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.json_object import JsonObject, renamed
from megatrain.contracts.location import LocalLocation, Location
from megatrain.contracts.manifest import FORMER_NAMES, Manifest

MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMIT"
PINNED_NAME = "PINNED"
WRITING_NAME = "WRITING"
TOKENIZER_NAME = "tokenizer.json"
COMMIT_SCHEMA_VERSION = 2
PINNED_SCHEMA_VERSION = 1
_DIRECTORY_NAME = re.compile(r"step-([0-9]{9,})")


def step_directory_name(step: int) -> str:
    """Return "step-000000120" for step 120: names sort as steps do, below 10^9 steps."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step that the name of a checkpoint directory says, or None for another name."""
    match = _DIRECTORY_NAME.fullmatch(name)
    if match is None or step_directory_name(int(match[1])) != name:
        return None
    return int(match[1])


def check_writable(directory: Location, round_number: int) -> None:
    """Refuse to write into a checkpoint that is complete, or through a link: what COMMIT vouches for changes no more.

    Raises: CheckpointError, which tells a process of an older round to stop.
    """
    if _is_link(directory):
        raise CheckpointError(f"{directory} is a symbolic link, and nothing is written through it; remove the link")
    _check_round(directory, round_number)
    if is_committed(directory):
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten; remove it first")


def write_manifest(directory: Location, manifest: Manifest) -> None:
    """Put the manifest in place, whole or not at all.

    Raises: CheckpointError when it cannot be written, or as `check_writable` does.
    """
    check_writable(directory, manifest.round)
    (directory / MANIFEST_NAME).write(manifest.to_json().encode())


def read_manifest(directory: Location, *, job: str | None = None, branch: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint directory. `job` and `branch`, when given, are the ones it must be of.

    Raises: MissingFileError; CheckpointError when it is damaged, says another step than the directory's name, or is of
    another job or branch.
    """
    place = directory / MANIFEST_NAME
    manifest = Manifest.from_json(_manifest_content(directory), str(place))
    if step_of(directory.name) not in (None, manifest.step):
        raise CheckpointError(f"{place}: step={manifest.step}, but the directory is {directory.name}; it was renamed")
    for field, found, expected in (("job", manifest.job, job), ("branch", manifest.branch, branch)):
        if expected not in (None, found):
            raise CheckpointError(
                f"{place}: {field}={found!r}, expected {expected!r}; the checkpoint was copied here from another"
                f" {field}: move it out of this directory, or name it with checkpoint.load to start from it"
            )
    return manifest


def wrong_files(directory: Location, manifest: Manifest) -> list[str]:
    """Return a sentence for each file of the manifest that is missing or has another size."""
    problems: list[str] = []
    for name, entry in sorted(manifest.files.items()):
        place = directory / name
        size = place.size()
        if size is None:
            problems.append(f"{place}: missing, expected {entry.size} bytes")
        elif size != entry.size:
            problems.append(f"{place}: {size} bytes, expected {entry.size}")
    return problems


def write_commit(directory: Location, manifest: Manifest) -> None:
    """Declare a checkpoint complete. Every file of it must be in place: this is the last write, and atomic.

    Doing it again with the same manifest is fine: a write may have failed in its last moment, or seemed to.
    Raises: CheckpointError when a newer round has committed this step, when the manifest in place is not `manifest`,
    or when COMMIT cannot be written.
    """
    _check_round(directory, manifest.round)
    found = read_manifest(directory)
    content = manifest.to_json().encode()
    if _manifest_content(directory) != content:
        raise CheckpointError(
            f"{directory / MANIFEST_NAME}: of round {found.round}, not what round {manifest.round}"
            " wrote; another process saves the same step, and one of the two must stop"
        )
    commit = {
        "schema_version": COMMIT_SCHEMA_VERSION,
        "step": manifest.step,
        "round": manifest.round,
        "manifest_crc32": zlib.crc32(content),
    }
    (directory / COMMIT_NAME).write((json.dumps(commit, sort_keys=True) + "\n").encode())


def is_committed(directory: Location) -> bool:
    """Say whether the directory is a complete checkpoint: COMMIT is there, and vouches for this manifest.

    Raises: CheckpointError when that cannot be told, because a file is there but cannot be read.
    """
    commit = _read_commit(directory)
    if commit is None:
        return False
    try:
        content = (directory / MANIFEST_NAME).read()
    except MissingFileError:
        return False
    return zlib.crc32(content) == commit["manifest_crc32"] and step_of(directory.name) in (None, commit["step"])


def commit_problem(directory: Location) -> str | None:
    """Return why a directory is no complete checkpoint, naming the file that is at fault; None when it is one.

    Raises: CheckpointError as `is_committed` does.
    """
    if is_committed(directory):
        return None
    place, commit = directory / COMMIT_NAME, _read_commit(directory)
    if commit is None:
        return f"{place}: {'damaged' if place.exists() else 'missing'}, so nothing vouches for the checkpoint"
    if step_of(directory.name) not in (None, commit["step"]):
        return f"{place}: of step {commit['step']}, but the directory is {directory.name}; it was renamed"
    manifest = directory / MANIFEST_NAME
    return f"{manifest}: {'changed since' if manifest.exists() else 'missing, but'} COMMIT vouched for it"


def is_unfinished(directory: Location) -> bool:
    """Say whether this is a checkpoint that was begun and never complete: nothing that was saved can be lost in it.

    One that was complete has no WRITING any more. An empty directory is one that was just begun.
    """
    if step_of(directory.name) is None or (directory / COMMIT_NAME).exists():
        return False
    if (directory / WRITING_NAME).exists():
        return True
    is_directory = directory.exists() and directory.size() is None
    return is_directory and not directory.entries()


def lacks_only_commit(directory: Location, branch: str) -> bool:
    """Say whether all of a checkpoint of `branch` is there but a COMMIT, and it does not say that it is being made.

    It was complete once, and whoever lost COMMIT may want it back: it is kept as long as retention would keep it whole.
    One whose removal was cut short just after COMMIT looks the same, and goes for the reason for which it was to go.
    Raises: CheckpointError when something cannot be looked up.
    """
    if (directory / COMMIT_NAME).exists() or is_unfinished(directory):
        return False
    try:
        manifest = read_manifest(directory, branch=branch)
    except CheckpointError:
        return False
    return not wrong_files(directory, manifest)


def committed_steps(branch: Location) -> list[int]:
    """Return the steps of a branch directory's committed checkpoints, ascending; none where there is nothing."""
    # the name first: it costs nothing, and COMMIT is looked for only where a checkpoint may be
    return sorted(
        step for entry in branch.entries() if (step := step_of(entry.name)) is not None and is_committed(entry)
    )


def remove_checkpoint(directory: Location) -> None:
    """Remove a checkpoint, complete or not. One that is removed half way is no checkpoint any more.

    Raises: CheckpointError when it is pinned or cannot be removed.
    """
    if is_pinned(directory):
        raise CheckpointError(f"{directory} is pinned and is kept; unpin it first")
    if _is_link(directory):
        # what it leads to is not ours: the link alone goes
        directory.remove()
        return
    if (directory / COMMIT_NAME).exists():
        # half removed, it must not look like one that was never complete
        (directory / WRITING_NAME).remove()
        (directory / COMMIT_NAME).remove()
    else:
        for entry in directory.entries():
            # half removed, it must look like one that was never complete, if it does now
            if entry.name != WRITING_NAME:
                entry.remove()
    directory.remove()


def is_pinned(directory: Location) -> bool:
    """Say whether a checkpoint is kept for ever. A damaged PINNED pins too."""
    return (directory / PINNED_NAME).exists()


def pin(directory: Location, reason: str) -> None:
    """Keep a checkpoint for ever.

    Raises: CheckpointError when it is not committed, or PINNED cannot be written.
    """
    if not is_committed(directory):
        raise CheckpointError(f"{directory} is no complete checkpoint (no matching COMMIT), so it cannot be pinned")
    pinned = {"schema_version": PINNED_SCHEMA_VERSION, "reason": reason, "pinned_unix_s": time.time()}
    (directory / PINNED_NAME).write((json.dumps(pinned, sort_keys=True) + "\n").encode())
    if not is_committed(directory):
        # a job that removes old checkpoints was quicker; what we wrote would be all there is of this one
        unpin(directory)
        if not directory.entries():
            directory.remove()
        raise CheckpointError(f"{directory} was removed just now, so it cannot be pinned")


def pin_reason(directory: Location) -> str | None:
    """Return why a checkpoint is pinned, or None when it is not.

    Raises: CheckpointError when PINNED is damaged.
    """
    place = directory / PINNED_NAME
    try:
        content = place.read()
    except MissingFileError:
        return None
    damage = "the checkpoint stays pinned; pin it again or unpin it"
    return JsonObject.parse(content, str(place), PINNED_SCHEMA_VERSION, damage).text("reason")


def unpin(directory: Location) -> None:
    """Let a checkpoint be removed again; one that is not pinned is fine."""
    (directory / PINNED_NAME).remove()


def _is_link(directory: Location) -> bool:
    """Say whether somebody has put a link here: it may lead to anything that this user may write."""
    return isinstance(directory, LocalLocation) and directory.path.is_symlink()


def _check_round(directory: Location, round_number: int) -> None:
    commit = _read_commit(directory)
    if commit is not None and commit["round"] > round_number:
        raise CheckpointError(
            f"{directory / COMMIT_NAME}: committed by round {commit['round']}, and round {round_number}"
            " is older; this process was left behind and must stop"
        )


def _manifest_content(directory: Location) -> bytes:
    try:
        return (directory / MANIFEST_NAME).read()
    except MissingFileError as error:
        raise MissingFileError(f"{error}; the checkpoint is incomplete") from error


def _read_commit(directory: Location) -> dict[str, int] | None:
    """Return what COMMIT says, or None when it is not there or is not one."""
    try:
        raw = json.loads((directory / COMMIT_NAME).read())
    except (MissingFileError, ValueError, RecursionError):
        return None
    if isinstance(raw, dict) and raw.get("schema_version") == COMMIT_SCHEMA_VERSION - 1:
        raw = {**renamed(raw, FORMER_NAMES), "schema_version": COMMIT_SCHEMA_VERSION}
    names = ("schema_version", "step", "round", "manifest_crc32")
    if not isinstance(raw, dict) or not all(isinstance(raw.get(name), int) for name in names):
        return None
    return raw if raw["schema_version"] == COMMIT_SCHEMA_VERSION else None
