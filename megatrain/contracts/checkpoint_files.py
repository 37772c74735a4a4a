"""The files that make a directory a checkpoint: step-000000120/ with r000002-manifest-1a2b3c4d.json and, last, COMMIT.

A checkpoint exists when its COMMIT does: it appears after everything else is in place, and names the manifest that it
vouches for. It is made exclusively: of two rounds that save the same step, one commits. Where a round that was left
behind has done so, which counts for nothing (round_starts.py), a newer one makes COMMIT-r000003 beside it, and that of
the newest round counts: nothing is ever removed that may belong to another round by now. All other names have the
round, and the manifest's its own digest, so that a late writer cannot change files that COMMIT covers. In older
checkpoints the manifest was manifest.json. COMMIT goes first when a checkpoint is removed. PINNED keeps one for ever.
WRITING is the first file of a checkpoint and goes after COMMIT: a directory with WRITING and no COMMIT was never
complete. Which of several checkpoints a job goes on from is lineage.py's, how tensors are stored is
megatrain.checkpoint's.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from dataclasses import asdict, dataclass, fields

from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.json_object import JsonObject, renamed
from megatrain.contracts.location import LocalLocation, Location, put_once
from megatrain.contracts.manifest import FORMER_NAMES, Manifest, name_in_round

FORMER_MANIFEST_NAME = "manifest.json"
METADATA_NAME = ".metadata"
"""What torch's readers look for."""
COMMIT_NAME = "COMMIT"
PINNED_NAME = "PINNED"
WRITING_NAME = "WRITING"
TOKENIZER_NAME = "tokenizer.json"
COMMIT_SCHEMA_VERSION = 3
PINNED_SCHEMA_VERSION = 1
_CRC32 = "crc32:"
_LATER_COMMIT = re.compile(rf"{COMMIT_NAME}-r[0-9]{{6,}}")
_MANIFEST_NAME = re.compile(r"r[0-9]{6,}-manifest-[0-9a-f]{8}\.json")
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


def check_writable(directory: Location, round_number: int, *, is_late: bool = False) -> None:
    """Refuse to write into a checkpoint that is complete, or through a link: what COMMIT vouches for changes no more.

    is_late: the one that is there was committed by a round that was left behind, and counts for nothing.
    Raises: CheckpointError, which tells a process of an older round to stop.
    """
    if _is_link(directory):
        raise CheckpointError(f"{directory} is a symbolic link, and nothing is written through it; remove the link")
    commit = read_commit(directory)
    _check_round(directory, commit, round_number)
    if not is_late and _problem_of(directory, commit) is None:
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten; remove it first")


def manifest_name(content: bytes, round_number: int) -> str:
    """Return what a manifest is called: no other content has this name."""
    return name_in_round(f"manifest-{hashlib.sha256(content).hexdigest()[:8]}.json", round_number)


def is_manifest_name(name: str) -> bool:
    """Say whether a file of a checkpoint directory is, or once was, a manifest."""
    return name == FORMER_MANIFEST_NAME or _MANIFEST_NAME.fullmatch(name) is not None


def manifest_place(directory: Location) -> Location:
    """Return the manifest that COMMIT names; without COMMIT the newest round's. It need not be there."""
    commit = read_commit(directory)
    if commit is not None:
        return directory / commit.manifest
    names = [entry.name for entry in directory.entries() if _MANIFEST_NAME.fullmatch(entry.name)]
    return directory / max(names, key=_round_and_name, default=FORMER_MANIFEST_NAME)


def _round_and_name(name: str) -> tuple[int, str]:
    return int(name[1:].partition("-")[0]), name


def write_manifest(directory: Location, manifest: Manifest, *, is_late: bool = False) -> None:
    """Put the manifest in place, whole or not at all. is_late: as in `check_writable`.

    Raises: CheckpointError when it cannot be written, or as `check_writable` does.
    """
    check_writable(directory, manifest.round, is_late=is_late)
    content = manifest.to_json().encode()
    (directory / manifest_name(content, manifest.round)).write(content)


def read_manifest(directory: Location, *, job: str | None = None, branch: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint directory. `job` and `branch`, when given, are the ones it must be of.

    Raises: MissingFileError; CheckpointError when it is damaged, says another step than the directory's name, or is of
    another job or branch.
    """
    place = manifest_place(directory)
    try:
        content = place.read()
    except MissingFileError as error:
        raise MissingFileError(f"{error}; the checkpoint is incomplete") from error
    manifest = Manifest.from_json(content, str(place))
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


def write_commit(directory: Location, manifest: Manifest, *, is_late: bool = False) -> None:
    """Declare a checkpoint complete, unless another round has. All its files must be in place: this is the last write.

    is_late: as in `check_writable`.

    Doing it again with the same manifest is fine: a write may have failed in its last moment, or its answer was lost.
    Raises: CheckpointError when another round, or another attempt of this one, has committed this step; or when COMMIT
    cannot be written.
    """
    content = manifest.to_json().encode()
    name = manifest_name(content, manifest.round)
    if (directory / name).read() != content:
        raise CheckpointError(f"{directory / name}: is not what round {manifest.round} wrote; the disk is at fault")
    commit = Commit(manifest.step, manifest.round, name, hashlib.sha256(content).hexdigest())
    raw = {"schema_version": COMMIT_SCHEMA_VERSION, **asdict(commit)}
    place = directory / (f"{COMMIT_NAME}-r{manifest.round:06d}" if is_late else COMMIT_NAME)
    if not put_once(place, (json.dumps(raw, sort_keys=True) + "\n").encode()):
        _check_round(directory, read_commit(directory), manifest.round)
        raise CheckpointError(
            f"{place}: another process has committed this step, and not what round {manifest.round} wrote; one of the"
            " two must stop"
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """What COMMIT says: the step, by which round, and the manifest with its SHA-256.

    Before rounds had names of their own the digest was a checksum: "crc32:" and a number.
    """

    step: int
    round: int
    manifest: str
    sha256: str

    def vouches_for(self, content: bytes) -> bool:
        """Say whether this is the content of the manifest."""
        if self.sha256.startswith(_CRC32):
            return self.sha256 == f"{_CRC32}{zlib.crc32(content)}"
        return self.sha256 == hashlib.sha256(content).hexdigest()


def commit_place(directory: Location) -> Location:
    """Return the COMMIT that is meant: the newest round's. It need not be there."""
    names = [entry.name for entry in directory.entries() if _LATER_COMMIT.fullmatch(entry.name)]
    return directory / max(names, key=lambda name: int(name.rpartition("r")[2]), default=COMMIT_NAME)


def read_commit(directory: Location) -> Commit | None:
    """Return what COMMIT says, None when it is not there or is not one.

    Raises: CheckpointError when it is there and cannot be read.
    """
    try:
        content = (directory / COMMIT_NAME).read()
        # without it there is no later one
        later = commit_place(directory)
        raw = json.loads(content if later.name == COMMIT_NAME else later.read())
    except (MissingFileError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    version = raw.get("schema_version")
    if version in (1, 2) and not isinstance(version, bool):
        raw = renamed(raw, FORMER_NAMES) if version == 1 else raw
        raw |= {"manifest": FORMER_MANIFEST_NAME, "sha256": f"{_CRC32}{raw.get('manifest_crc32')}"}
    elif version != COMMIT_SCHEMA_VERSION:
        return None
    step, round_number, manifest, sha256 = (raw.get(field.name) for field in fields(Commit))
    if type(step) is not int or type(round_number) is not int or not isinstance(sha256, str):
        return None
    if not isinstance(manifest, str) or not is_manifest_name(manifest):
        return None
    return Commit(step, round_number, manifest, sha256)


def is_committed(directory: Location) -> bool:
    """Say whether the directory is a complete checkpoint: COMMIT is there, and vouches for the manifest that it names.

    Raises: CheckpointError when that is unknown, because a file exists but cannot be read.
    """
    return commit_problem(directory) is None


def commit_problem(directory: Location) -> str | None:
    """Return why a directory is no complete checkpoint, naming the file that is at fault; None when it is one.

    Raises: CheckpointError as `is_committed` does.
    """
    return _problem_of(directory, read_commit(directory))


def vouched_commit(directory: Location) -> Commit | None:
    """Return what the COMMIT of a complete checkpoint says, None where there is none. Raises: as `is_committed`."""
    commit = read_commit(directory)
    return commit if _problem_of(directory, commit) is None else None


def _problem_of(directory: Location, commit: Commit | None) -> str | None:
    if commit is None:
        place = directory / COMMIT_NAME
        return f"{place}: {'damaged' if place.exists() else 'missing'}, so nothing vouches for the checkpoint"
    if step_of(directory.name) not in (None, commit.step):
        return (
            f"{commit_place(directory)}: of step {commit.step}, but the directory is {directory.name}; it was renamed"
        )
    manifest = directory / commit.manifest
    try:
        content = manifest.read()
    except MissingFileError:
        return f"{manifest}: missing, but COMMIT vouched for it"
    return None if commit.vouches_for(content) else f"{manifest}: changed since COMMIT vouched for it"


def expose_metadata(directory: Location, manifest: Manifest) -> None:
    """Put the metadata of a committed checkpoint where torch's readers look for it; ours read what COMMIT vouches for.

    Raises: CheckpointError.
    """
    exposed, name = directory / METADATA_NAME, manifest.name_of(METADATA_NAME)
    if name != METADATA_NAME and name in manifest.files:
        content = (directory / name).read()
        if exposed.size() != len(content) or exposed.read() != content:
            exposed.write(content)


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
    return sorted(committed_rounds(branch))


def committed_rounds(branch: Location) -> dict[int, int]:
    """Return the round that committed each step of a branch directory; none where there is nothing."""
    found: dict[int, int] = {}
    for entry in branch.entries():
        # the name first: it costs nothing, and COMMIT is looked for only where a checkpoint may be
        step = step_of(entry.name)
        if step is not None and (commit := vouched_commit(entry)) is not None:
            found[step] = commit.round
    return found


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
        for entry in directory.entries():
            if _LATER_COMMIT.fullmatch(entry.name):
                entry.remove()
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


def _check_round(directory: Location, commit: Commit | None, round_number: int) -> None:
    if commit is not None and commit.round > round_number:
        raise CheckpointError(
            f"{commit_place(directory)}: committed by round {commit.round}, and round {round_number}"
            " is older; this process was left behind and must stop"
        )
