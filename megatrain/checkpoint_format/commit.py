"""COMMIT, the file that makes a directory a checkpoint.

A checkpoint exists when its COMMIT file exists. COMMIT is written last. It covers all other files: it holds the digest
of the manifest, and the manifest holds theirs. COMMIT is created exclusively: of two rounds that save the same step,
only one commits. If that round is superseded, its COMMIT does not count (round_starts.py). Then a newer round adds
COMMIT-r000003, and the COMMIT of the newest round counts. So no process removes a file that may belong to another
round.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from megatrain.checkpoint_format.checkpoint_names import (
    COMMIT_NAME,
    LATER_COMMIT_NAME,
    is_manifest_name,
    manifest_name,
    step_of,
)
from megatrain.checkpoint_format.location import Location, put_once
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.contracts.errors import CheckpointError, MissingFileError

COMMIT_SCHEMA_VERSION = 3


def write_commit(directory: Location, manifest: Manifest, *, is_superseded: bool = False) -> None:
    """Commit a checkpoint, unless another round has committed it. All files of the checkpoint must be in place.

    is_superseded: as in `checkpoint_files.check_writable`.

    A repeated call with the same manifest succeeds, because an earlier call may have written COMMIT without an answer.
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
        check_round(directory, read_commit(directory), manifest.round)
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
    names = [entry.name for entry in directory.entries() if LATER_COMMIT_NAME.fullmatch(entry.name)]
    return directory / max(names, key=lambda name: int(name.rpartition("r")[2]), default=COMMIT_NAME)


def read_commit(directory: Location) -> Commit | None:
    """Return the content of the COMMIT that counts, None when it is missing or invalid.

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
    return problem_of(directory, read_commit(directory))


def matching_commit(directory: Location) -> Commit | None:
    """Return COMMIT if it names this directory's step and a manifest with the digest that it records, else None.

    Raises: CheckpointError as `is_committed` does.
    """
    commit = read_commit(directory)
    return commit if problem_of(directory, commit) is None else None


def problem_of(directory: Location, commit: Commit | None) -> str | None:
    """Like `commit_problem`, for a COMMIT that has been read already."""
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


def check_round(directory: Location, commit: Commit | None, round_number: int) -> None:
    """Raises: CheckpointError when a round after `round_number` has committed the checkpoint."""
    if commit is not None and commit.round > round_number:
        raise CheckpointError(
            f"{commit_location(directory)}: committed by round {commit.round}, and round {round_number}"
            " is older; this process is left over from it and must stop"
        )
