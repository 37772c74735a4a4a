"""The files that make a directory a checkpoint: step-000000120/ with manifest.json and, last of all, COMMIT.

A checkpoint exists when its COMMIT does: it is renamed into place after everything else is on disk, and repeats the
checksum of the manifest it vouches for. A directory of checkpoints that holds files but nothing committed is an error,
because starting from scratch there would be a silent loss of a run. How tensors are stored is megatrain.checkpoint's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, Self

from megatrain.contracts.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMIT"
SCHEMA_VERSION = 1
_DIRECTORY_NAME = re.compile(r"step-([0-9]{9,})")


def step_directory_name(step: int) -> str:
    """Return "step-000000120" for step 120: names sort as steps do."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return f"step-{step:09d}"


def step_of(directory: Path) -> int | None:
    """Return the step that a checkpoint directory's name says, or None for another name."""
    match = _DIRECTORY_NAME.fullmatch(directory.name)
    if match is None or step_directory_name(int(match[1])) != directory.name:
        return None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class CheckpointMesh:
    """The layout that wrote a checkpoint. Any other may read it."""

    tp_size: int
    pp_size: int
    dp_size: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class CheckpointVersions:
    """The programs that wrote a checkpoint."""

    megatrain: str
    torch: str
    python: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is of, and the size of each of its files.

    `consumed_samples` is the cursor in the sample order; `num_updates` counts the optimizer's updates: `step` less the
    `num_skipped` steps that were not finite. `incarnation` is the round that wrote it. `files` maps paths
    relative to the directory to bytes, without the manifest and COMMIT themselves.
    """

    job: str
    branch: str
    incarnation: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    num_updates: int
    num_skipped: int
    mesh: CheckpointMesh
    config_hash: str
    config: Mapping[str, Any]
    versions: CheckpointVersions
    files: Mapping[str, int]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, place: str) -> Self:
        """Return the manifest that `text` holds; `place` names the file in errors.

        Raises: CheckpointError naming the file and the field that is missing, unknown or of a wrong kind.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{place}: not JSON ({error}); the checkpoint is damaged") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{place}: a {type(raw).__name__}, expected a JSON object")
        version = raw.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise CheckpointError(
                f"{place}: schema_version={version!r}, this program reads {SCHEMA_VERSION}; use the program that"
                " wrote it"
            )
        reader = _FieldReader(raw, place)
        reader.check_keys(cls)
        mesh = reader.section("mesh", CheckpointMesh)
        versions = reader.section("versions", CheckpointVersions)
        return cls(
            job=reader.text("job"),
            branch=reader.text("branch"),
            incarnation=reader.count("incarnation"),
            step=reader.count("step"),
            consumed_samples=reader.count("consumed_samples"),
            consumed_tokens=reader.count("consumed_tokens"),
            num_updates=reader.count("num_updates"),
            num_skipped=reader.count("num_skipped"),
            mesh=CheckpointMesh(**{field.name: mesh.count(field.name, least=1) for field in fields(CheckpointMesh)}),
            config_hash=reader.text("config_hash"),
            config=reader.mapping("config"),
            versions=CheckpointVersions(
                **{field.name: versions.text(field.name) for field in fields(CheckpointVersions)}
            ),
            files=reader.file_sizes("files"),
        )


class _FieldReader:
    """Takes fields of known kinds out of a JSON object."""

    def __init__(self, raw: Mapping[str, Any], place: str, prefix: str = "") -> None:
        self._raw = raw
        self._place = place
        self._prefix = prefix

    def _fail(self, name: str, rule: str) -> CheckpointError:
        found = f"={self._raw[name]!r}" if name in self._raw else " is missing"
        return CheckpointError(f"{self._place}: {self._prefix}{name}{found}; {rule}")

    def check_keys(self, kind: type[Any]) -> None:
        known = {field.name for field in fields(kind)}
        for name in self._raw:
            if name not in known:
                raise self._fail(name, f"no such field in schema version {SCHEMA_VERSION}")

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise self._fail(name, "expected a string")
        return value

    def count(self, name: str, least: int = 0) -> int:
        value = self._raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._fail(name, f"expected an integer of at least {least}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._raw.get(name)
        if not isinstance(value, dict):
            raise self._fail(name, "expected an object")
        return value

    def section(self, name: str, kind: type[Any]) -> _FieldReader:
        section = _FieldReader(self.mapping(name), self._place, f"{self._prefix}{name}.")
        section.check_keys(kind)
        return section

    def file_sizes(self, name: str) -> dict[str, int]:
        files = self.mapping(name)
        sizes = _FieldReader(files, self._place, f"{self._prefix}{name}.")
        for path in files:
            pure = PurePosixPath(path)
            if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
                raise sizes._fail(path, "expected a path inside the checkpoint directory")
            sizes.count(path)
        return files


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Put the manifest on disk, whole or not at all.

    Raises: CheckpointError when it cannot be written.
    """
    _write_atomically(directory / MANIFEST_NAME, manifest.to_json().encode())


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint directory.

    Raises: CheckpointError when it is missing or damaged, or says another step than the directory's name.
    """
    path = directory / MANIFEST_NAME
    manifest = Manifest.from_json(_read(path), str(path))
    if step_of(directory) not in (None, manifest.step):
        raise CheckpointError(f"{path}: step={manifest.step}, but the directory is {directory.name}; it was renamed")
    return manifest


def wrong_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return a sentence for each file of the manifest that is missing or has another size."""
    problems: list[str] = []
    for name, size in sorted(manifest.files.items()):
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            problems.append(f"{directory / name}: {error.strerror}, expected {size} bytes")
            continue
        if found != size:
            problems.append(f"{directory / name}: {found} bytes, expected {size}")
    return problems


def write_commit(directory: Path) -> None:
    """Declare a checkpoint complete. Every file of it must be on disk: this is the last write, and atomic.

    Raises: CheckpointError when the manifest is missing, damaged or of another step, when a newer round has already
    committed this step, or when COMMIT cannot be written.
    """
    manifest = read_manifest(directory)
    before = _read_commit(directory)
    if before is not None and before["incarnation"] > manifest.incarnation:
        raise CheckpointError(
            f"{directory / COMMIT_NAME}: committed by round {before['incarnation']}, and round {manifest.incarnation}"
            " is older; this process was left behind and must stop"
        )
    commit = {
        "schema_version": SCHEMA_VERSION,
        "step": manifest.step,
        "incarnation": manifest.incarnation,
        "manifest_crc32": zlib.crc32((directory / MANIFEST_NAME).read_bytes()),
    }
    _write_atomically(directory / COMMIT_NAME, (json.dumps(commit, sort_keys=True) + "\n").encode())


def is_committed(directory: Path) -> bool:
    """Say whether the directory is a complete checkpoint: COMMIT is there, and vouches for this manifest."""
    commit = _read_commit(directory)
    if commit is None:
        return False
    try:
        raw = (directory / MANIFEST_NAME).read_bytes()
    except OSError:
        return False
    return zlib.crc32(raw) == commit["manifest_crc32"] and step_of(directory) in (None, commit["step"])


def committed_steps(checkpoints: Path) -> list[int]:
    """Return the steps of all committed checkpoints, ascending; none for a directory that does not exist."""
    steps = (step_of(entry) for entry in _entries(checkpoints) if is_committed(entry))
    return sorted(step for step in steps if step is not None)


def newest_committed(checkpoints: Path) -> Path | None:
    """Return the committed checkpoint of the highest step; None where there is nothing at all.

    Raises: CheckpointError when there is something, but nothing committed.
    """
    steps = committed_steps(checkpoints)
    if steps:
        return checkpoints / step_directory_name(steps[-1])
    names = sorted(entry.name for entry in _entries(checkpoints))
    if not names:
        return None
    raise CheckpointError(
        f"{checkpoints}: holds {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}, but no committed"
        " checkpoint (a step-* directory with a matching COMMIT); remove it to start from scratch, or name another"
        " job.run_directory or checkpoint.load"
    )


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot list checkpoints: {error.strerror}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the checkpoint is incomplete") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 ({error.reason}); the checkpoint is damaged") from error


def _read_commit(directory: Path) -> dict[str, int] | None:
    """Return what COMMIT says, or None when it is not there or is not one."""
    try:
        raw = json.loads((directory / COMMIT_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    names = ("schema_version", "step", "incarnation", "manifest_crc32")
    if not isinstance(raw, dict) or not all(isinstance(raw.get(name), int) for name in names):
        return None
    return raw if raw["schema_version"] == SCHEMA_VERSION else None


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        # The rename itself is on disk only when the directory is.
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
