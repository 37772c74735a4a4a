"""The small files through which the writers of all hosts coordinate while they make one checkpoint.

    WRITING                      which round makes this checkpoint; the first file, removed after COMMIT
    host-r000002-00001.done      a host's data files are in place; has their sizes and digests
    host-r000002-00001.failed    a host has given up, and no writer must wait for it any longer

Writers have no other connection: they share only the storage. The names of .done and .failed files contain the round,
so that a superseded process of an older round cannot overwrite those of a newer one, and the files contain the number
of the snapshot. WRITING contains the round: `claim` never replaces the mark of a newer one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint_format.checkpoint_files import check_writable
from megatrain.checkpoint_format.checkpoint_names import (
    SENTENCEPIECE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    WRITING_NAME,
)
from megatrain.checkpoint_format.location import Location, is_relative_name
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.json_object import JsonObject

MARK_SCHEMA_VERSION = 1
_DAMAGE = "remove it, and the checkpoint is written again"
_TOKENIZER_FILES = "|".join(map(re.escape, (TOKENIZER_NAME, SENTENCEPIECE_NAME, TOKENIZER_CONFIG_NAME)))
_OF_ROUND = re.compile(
    r"(host-)?r([0-9]{6,})-([0-9]{5,}\.done|[0-9]{5,}\.failed|manifest-[0-9a-f]{8}\.json|metadata|index\.json"
    rf"|{_TOKENIZER_FILES}|rank-[0-9]{{5,}}\.distcp)"
)


def done_name(round_number: int, host_index: int) -> str:
    return f"host-r{round_number:06d}-{host_index:05d}.done"


def failed_name(round_number: int, host_index: int) -> str:
    return f"host-r{round_number:06d}-{host_index:05d}.failed"


def is_leftover(name: str, round_number: int) -> bool:
    """Return whether a file that the manifest does not list is no longer used after `round_number` has committed.

    Such files are WRITING, the round's marks and other manifests, and all files of older rounds.
    """
    match = _OF_ROUND.fullmatch(name)
    if match is None:
        return name == WRITING_NAME
    is_of_one_attempt = match[1] is not None or match[3].startswith("manifest-")
    return int(match[2]) < round_number or (is_of_one_attempt and int(match[2]) == round_number)


def is_mark(name: str) -> bool:
    """Return whether a file is a mark: WRITING, or a host's .done or .failed file."""
    match = _OF_ROUND.fullmatch(name)
    return name == WRITING_NAME or (match is not None and match[1] is not None)


def is_small_file(name: str, round_number: int) -> bool:
    """Return whether a file is one that the coordinator of this round writes in addition to data files."""
    match = _OF_ROUND.fullmatch(name)
    is_small = match is not None and match[1] is None and not match[3].startswith("rank-")
    return match is not None and is_small and int(match[2]) == round_number


@dataclass(frozen=True, slots=True)
class WritingMark:
    """The job and round that make a checkpoint, and the time when they began."""

    round: int
    job: str
    started_unix_s: float

    def write(self, directory: Location) -> None:
        """Raises: CheckpointError naming the file."""
        _write(directory / WRITING_NAME, asdict(self))

    @classmethod
    def read(cls, directory: Location) -> Self | None:
        """Return the mark, None when it is missing or damaged. Losing a mark loses no saved data."""
        location = directory / WRITING_NAME
        try:
            content = location.read()
        except MissingFileError:
            return None
        try:
            reader = JsonObject.parse(content, str(location), MARK_SCHEMA_VERSION, _DAMAGE)
            return cls(reader.count("round"), reader.text("job"), reader.seconds("started_unix_s"))
        except CheckpointError:
            return None


def claim(directory: Location, mark: WritingMark, *, is_superseded: bool = False) -> None:
    """Record that a round makes this checkpoint, unless it is complete or a newer round makes it.

    is_superseded: as in `check_writable`.

    Raises: CheckpointError, also in a process of an older round, which must stop then.
    """
    check_writable(directory, mark.round, is_superseded=is_superseded)
    found = WritingMark.read(directory)
    if found is not None and found.round > mark.round:
        raise CheckpointError(
            f"{directory / WRITING_NAME}: round {found.round} is writing this checkpoint, and round {mark.round} is"
            " older; this process is left over from it and must stop"
        )
    if found is None or found.round < mark.round:
        mark.write(directory)


@dataclass(frozen=True, slots=True)
class DoneMark:
    """A host's data files of one snapshot. `write_s`: time from the first byte until all files were durable."""

    snapshot: SealedSnapshot
    host_index: int
    write_s: float
    files: Mapping[str, FileEntry]

    def write(self, directory: Location) -> None:
        """Raises: CheckpointError naming the file."""
        raw = {**asdict(self.snapshot), "host_index": self.host_index, "write_s": self.write_s}
        files = {name: [entry.size, entry.digest] for name, entry in sorted(self.files.items())}
        _write(directory / done_name(self.snapshot.round, self.host_index), {**raw, "files": files})

    @classmethod
    def read(cls, directory: Location, snapshot: SealedSnapshot, host_index: int) -> Self | None:
        """Return a host's mark for this snapshot, None without one.

        Raises: CheckpointError when it is damaged.
        """
        reader = _read(directory / done_name(snapshot.round, host_index))
        if reader is None or reader.snapshot() != snapshot:
            return None
        return cls(snapshot, host_index, reader.seconds("write_s"), reader.files())


def write_failed(directory: Location, snapshot: SealedSnapshot, host_index: int, problem: str) -> None:
    """Record for the other hosts that they must not wait for this one. Raises: CheckpointError naming the file."""
    _write(directory / failed_name(snapshot.round, host_index), {**asdict(snapshot), "problem": problem})


def read_failed(directory: Location, snapshot: SealedSnapshot, host_index: int) -> str | None:
    """Return why a host has given up this snapshot, None when it has not given up.

    Raises: CheckpointError when the file is damaged.
    """
    reader = _read(directory / failed_name(snapshot.round, host_index))
    return reader.text("problem") if reader is not None and reader.snapshot() == snapshot else None


class _MarkObject(JsonObject):
    """The JSON of a mark."""

    def snapshot(self) -> SealedSnapshot:
        return SealedSnapshot(self.count("step"), self.count("round"), self.count("snapshot"))

    def files(self) -> dict[str, FileEntry]:
        files: dict[str, FileEntry] = {}
        for name, entry in self.mapping("files").items():
            is_entry = isinstance(entry, list) and [type(value) for value in entry] == [int, str]
            if not is_entry or not is_relative_name(name):
                raise self.error("files", "expected [size, digest] by the name of a file")
            files[name] = FileEntry(entry[0], entry[1])
        return files


def _read(location: Location) -> _MarkObject | None:
    try:
        content = location.read()
    except MissingFileError:
        return None
    return _MarkObject.parse(content, str(location), MARK_SCHEMA_VERSION, _DAMAGE)


def _write(location: Location, raw: Mapping[str, object]) -> None:
    location.write((json.dumps({"schema_version": MARK_SCHEMA_VERSION, **raw}, sort_keys=True) + "\n").encode())
