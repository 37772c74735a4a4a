"""The files that make a directory a checkpoint: step-000000120/ with r000002-manifest-1a2b3c4d.json and, last, COMMIT.

A checkpoint exists when its COMMIT does. COMMIT appears after everything else is in place. It covers all other files:
it has the manifest's digest, and the manifest has theirs. It is created exclusively: of two rounds that save the same
step, only one commits. If that was a superseded round, whose COMMIT does not count (round_starts.py), a newer round
creates COMMIT-r000003 in addition, and the COMMIT of the newest round counts. So no process removes a file that may
belong to another round. All other names contain the round, and the manifest's name its own digest, so that the writer
of a superseded round cannot change files that COMMIT covers. A removal of a checkpoint removes COMMIT first. PINNED
keeps a checkpoint forever. WRITING is the first file of a checkpoint and is removed after COMMIT: a directory with
WRITING and no COMMIT was never complete. lineage.py decides which checkpoint a job resumes from; megatrain.checkpoint
stores tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass, fields

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location, put_once
from megatrain.checkpoint_format.manifest import Manifest, name_in_round
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.json_object import JsonObject

METADATA_NAME = ".metadata"
"""The description that torch's readers use."""
INDEX_NAME = "index.json"
"""The description that our readers use: the same content, readable without torch."""
COMMIT_NAME = "COMMIT"
PINNED_NAME = "PINNED"
WRITING_NAME = "WRITING"
TOKENIZER_NAME = "tokenizer.json"
SENTENCEPIECE_NAME = "tokenizer.model"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
COMMIT_SCHEMA_VERSION = 3
PINNED_SCHEMA_VERSION = 1
_LATER_COMMIT = re.compile(rf"{COMMIT_NAME}-r[0-9]{{6,}}")
_MANIFEST_NAME = re.compile(r"r[0-9]{6,}-manifest-[0-9a-f]{8}\.json")
_DIRECTORY_NAME = re.compile(r"step-([0-9]{9,})")


def is_sentencepiece(name: str) -> bool:
    """Return whether a tokenizer's file is a SentencePiece model, by its name; else it is a tokenizer.json."""
    return name.endswith(".model")


def step_directory_name(step: int) -> str:
    """Return "step-000000120" for step 120. Below 10^9 steps, names sort like steps."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint directory, or None for any other name."""
    match = _DIRECTORY_NAME.fullmatch(name)
    if match is None or step_directory_name(int(match[1])) != name:
        return None
    return int(match[1])


def check_writable(directory: Location, round_number: int, *, is_superseded: bool = False) -> None:
    """Refuse to write into a complete checkpoint, or through a link: files that COMMIT covers never change.

    is_superseded: the existing checkpoint was committed by a superseded round, and does not count.
    Raises: CheckpointError, which asks a process of an older round to stop.
    """
    if _is_link(directory):
        raise CheckpointError(f"{directory} is a symbolic link, and nothing is written through it; remove the link")
    commit = read_commit(directory)
    _check_round(directory, commit, round_number)
    if not is_superseded and _problem_of(directory, commit) is None:
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten; remove it first")


def manifest_name(content: bytes, round_number: int) -> str:
    """Return the file name of a manifest. No other content has this name."""
    return name_in_round(f"manifest-{hashlib.sha256(content).hexdigest()[:8]}.json", round_number)


def is_manifest_name(name: str) -> bool:
    """Return whether a file name is that of a manifest."""
    return _MANIFEST_NAME.fullmatch(name) is not None


def manifest_location(directory: Location) -> Location:
    """Return the path of the manifest that COMMIT names; without COMMIT, of the newest round's.

    Raises: MissingFileError when there is no manifest; CheckpointError when COMMIT cannot be read.
    """
    commit = read_commit(directory)
    if commit is not None:
        return directory / commit.manifest
    names = [entry.name for entry in directory.entries() if _MANIFEST_NAME.fullmatch(entry.name)]
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
    """Return the manifest of a checkpoint directory. `job` and `branch`, when given, must be the checkpoint's own.

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


def write_commit(directory: Location, manifest: Manifest, *, is_superseded: bool = False) -> None:
    """Commit a checkpoint, unless another round has. This is the last write: all its files must be in place.

    is_superseded: as in `check_writable`.

    Repeating it with the same manifest succeeds: an earlier write may have failed at the end, or its answer was lost.
    Raises: CheckpointError when another round, or another attempt of this one, has committed this step; or when COMMIT
    cannot be written.
    """
    content = manifest.to_json().encode()
    name = manifest_name(content, manifest.round)
    if (directory / name).read() != content:
        raise CheckpointError(f"{directory / name}: differs from what round {manifest.round} wrote; the disk is faulty")
    commit = Commit(manifest.step, manifest.round, name, hashlib.sha256(content).hexdigest())
    raw = {"schema_version": COMMIT_SCHEMA_VERSION, **asdict(commit)}
    location = directory / (f"{COMMIT_NAME}-r{manifest.round:06d}" if is_superseded else COMMIT_NAME)
    if not put_once(location, (json.dumps(raw, sort_keys=True) + "\n").encode()):
        _check_round(directory, read_commit(directory), manifest.round)
        raise CheckpointError(
            f"{location}: another process has committed this step with other content than round {manifest.round} wrote;"
            " one of the two must stop"
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """The content of COMMIT: step, round, and the manifest with its SHA-256."""

    step: int
    round: int
    manifest: str
    sha256: str

    def covers(self, content: bytes) -> bool:
        """Return whether `content` is the content of the manifest."""
        return self.sha256 == hashlib.sha256(content).hexdigest()


def commit_location(directory: Location) -> Location:
    """Return the location of the COMMIT that counts: the newest round's. It may be missing."""
    names = [entry.name for entry in directory.entries() if _LATER_COMMIT.fullmatch(entry.name)]
    return directory / max(names, key=lambda name: int(name.rpartition("r")[2]), default=COMMIT_NAME)


def read_commit(directory: Location) -> Commit | None:
    """Return the content of COMMIT, None when it is missing or invalid.

    Raises: CheckpointError when it exists but cannot be read.
    """
    try:
        content = (directory / COMMIT_NAME).read()
        # without COMMIT there is no COMMIT-r<n>
        later = commit_location(directory)
        raw = json.loads(content if later.name == COMMIT_NAME else later.read())
    except (MissingFileError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    if raw.get("schema_version") != COMMIT_SCHEMA_VERSION:
        return None
    step, round_number, manifest, sha256 = (raw.get(field.name) for field in fields(Commit))
    if type(step) is not int or type(round_number) is not int or not isinstance(sha256, str):
        return None
    if not isinstance(manifest, str) or not is_manifest_name(manifest):
        return None
    return Commit(step, round_number, manifest, sha256)


def is_committed(directory: Location) -> bool:
    """Return whether the directory is a complete checkpoint: COMMIT exists and matches the manifest that it names.

    Raises: CheckpointError when that is unknown, because a file exists but cannot be read.
    """
    return commit_problem(directory) is None


def commit_problem(directory: Location) -> str | None:
    """Return why a directory is not a complete checkpoint, naming the file at fault; None when it is one.

    Raises: CheckpointError as `is_committed` does.
    """
    return _problem_of(directory, read_commit(directory))


def matching_commit(directory: Location) -> Commit | None:
    """Return COMMIT if it names this directory's step and a manifest with the digest that it records, else None.

    Raises: CheckpointError as `is_committed` does.
    """
    commit = read_commit(directory)
    return commit if _problem_of(directory, commit) is None else None


def _problem_of(directory: Location, commit: Commit | None) -> str | None:
    if commit is None:
        location = directory / COMMIT_NAME
        return f"{location}: {'damaged' if location.exists() else 'missing'}, so the checkpoint is not committed"
    if step_of(directory.name) not in (None, commit.step):
        return (
            f"{commit_location(directory)}: of step {commit.step}, but the directory is {directory.name}; "
            "it was renamed"
        )
    manifest = directory / commit.manifest
    try:
        content = manifest.read()
    except MissingFileError:
        return f"{manifest}: missing, although COMMIT names it"
    return None if commit.covers(content) else f"{manifest}: changed after it was committed"


def expose_metadata(directory: Location, manifest: Manifest) -> None:
    """Copy the metadata of a committed checkpoint to where torch's readers look. Ours use the file in the manifest.

    Raises: CheckpointError.
    """
    exposed, name = directory / METADATA_NAME, manifest.name_of(METADATA_NAME)
    if name != METADATA_NAME and name in manifest.files:
        content = (directory / name).read()
        if exposed.size() != len(content) or exposed.read() != content:
            exposed.write(content)


def is_unfinished(directory: Location) -> bool:
    """Return whether this checkpoint was begun but never complete, so that removing it loses no saved state.

    A checkpoint that was complete has no WRITING any more. An empty directory counts as just begun.
    """
    if step_of(directory.name) is None or (directory / COMMIT_NAME).exists():
        return False
    if (directory / WRITING_NAME).exists():
        return True
    is_directory = directory.exists() and directory.size() is None
    return is_directory and not directory.entries()


def lacks_only_commit(directory: Location, branch: str) -> bool:
    """Return whether a checkpoint of `branch` lacks nothing except COMMIT, and has no mark of a write in progress.

    It was complete once, and a person who lost COMMIT may want it back. So retention keeps it as long as a whole one. A
    checkpoint whose removal was interrupted just after COMMIT looks the same; retention removes it for the same reason
    as before.
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
    """Return the steps of a branch directory's committed checkpoints, ascending; empty when there are none."""
    return sorted(committed_rounds(branch))


def committed_rounds(branch: Location) -> dict[int, int]:
    """Return the round that committed each step of a branch directory; empty when there are none."""
    found: dict[int, int] = {}
    for entry in branch.entries():
        # check the name first: it costs nothing, and avoids reading COMMIT where no checkpoint can be
        step = step_of(entry.name)
        if step is not None and (commit := matching_commit(entry)) is not None:
            found[step] = commit.round
    return found


def remove_checkpoint(directory: Location) -> None:
    """Remove a checkpoint, complete or not. A partly removed one does not count as a checkpoint.

    Raises: CheckpointError when it is pinned or cannot be removed.
    """
    if is_pinned(directory):
        raise CheckpointError(f"{directory} is pinned and is kept; unpin it first")
    if _is_link(directory):
        # the link's target is not ours: remove only the link
        directory.remove()
        return
    if (directory / COMMIT_NAME).exists():
        # partly removed, it must not look like one that was never complete
        (directory / WRITING_NAME).remove()
        for entry in directory.entries():
            if _LATER_COMMIT.fullmatch(entry.name):
                entry.remove()
        (directory / COMMIT_NAME).remove()
    else:
        for entry in directory.entries():
            # partly removed, it must still look like one that was never complete, if it does now
            if entry.name != WRITING_NAME:
                entry.remove()
    directory.remove()


def is_pinned(directory: Location) -> bool:
    """Return whether a checkpoint is kept forever. A damaged PINNED pins too."""
    return (directory / PINNED_NAME).exists()


def pin(directory: Location, reason: str) -> None:
    """Keep a checkpoint forever.

    Raises: CheckpointError when it is not committed, or PINNED cannot be written.
    """
    pinned = {"schema_version": PINNED_SCHEMA_VERSION, "reason": reason, "pinned_unix_s": time.time()}
    if not is_committed(directory):
        raise CheckpointError(f"{directory} is not a complete checkpoint (no matching COMMIT), so it cannot be pinned")
    (directory / PINNED_NAME).write((json.dumps(pinned, sort_keys=True) + "\n").encode())
    if not is_committed(directory):
        # a job's retention removed the checkpoint meanwhile; PINNED would be all that is left of it
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
    """Return whether this is a link: it may lead to any file that this user may write."""
    return isinstance(directory, LocalLocation) and directory.path.is_symlink()


def _check_round(directory: Location, commit: Commit | None, round_number: int) -> None:
    if commit is not None and commit.round > round_number:
        raise CheckpointError(
            f"{commit_location(directory)}: committed by round {commit.round}, and round {round_number}"
            " is older; this process is left over from it and must stop"
        )
