"""The JSON files of an arena: the workers' instructions for the writer process, and the writer's status.

host.json is the HostPlan of a round, plan-00003.json the RankPlan of rank 3. With these files, a process without torch
can write sealed slots as a checkpoint. status.json is the WriterStatus. Each write replaces a whole file. There is no
fsync, because an arena does not survive a crash of the machine.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from megatrain.arena.slot_layout import MAX_SLOTS, PLAN_DIGEST_BYTES
from megatrain.checkpoint_format.item_ranges import item_ranges_problem
from megatrain.checkpoint_format.manifest import CheckpointMesh, CheckpointVersions
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.json_object import JsonObject

PLAN_SCHEMA_VERSION = 2
_DAMAGE = "the arena is damaged; remove its directory, and the job restarts from storage"


@dataclass(frozen=True, slots=True)
class ManifestTemplate:
    """The fields that the manifests of all checkpoints of a round have in common."""

    config: Mapping[str, Any]
    config_hash: str
    mesh: CheckpointMesh
    versions: CheckpointVersions
    has_optimizer: bool
    data: SampleStream


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The instructions for a host's writer in a round.

    `checkpoints` is the directory or URL of the branches. `ranks` are those that run on this host. The coordinator, the
    writer on the host of rank 0, waits up to `commit_timeout_s` for the other hosts, then writes the metadata, the
    manifest and COMMIT, and removes old checkpoints by `keep_last` and `keep_every`. A writer without workers exits
    after `keep_arena_s`, but first stores the snapshots that wait for it. `tokenizer` is the path of a file to put into
    each checkpoint, "" for none. `claim` is the content of the round's claim to the checkpoints, "" when it has none;
    the round resumed at `began_at_step`. `is_exclusive`: storage lets only one of two writers create a file.
    """

    checkpoints: str
    job: str
    branch: str
    round: int
    host_index: int
    num_hosts: int
    ranks: tuple[int, ...]
    is_coordinator: bool
    num_slots: int
    keep_last: int
    keep_every: int
    keep_arena_s: float
    commit_timeout_s: float
    manifest: ManifestTemplate
    tokenizer: str
    claim: str
    began_at_step: int
    is_exclusive: bool
    schema_version: int = PLAN_SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Put the plan in place. Raises: CheckpointError naming the file."""
        manifest = {**asdict(self.manifest), "mesh": self.manifest.mesh.to_dict()}
        _write(path, {**asdict(self), "manifest": manifest})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the plan in a file. Raises: MissingFileError; CheckpointError naming the file and the field."""
        reader = _read(path, cls)
        num_hosts = reader.count("num_hosts", least=1)
        if reader.count("host_index") >= num_hosts:
            raise reader.error("host_index", f"expected less than num_hosts={num_hosts}")
        if reader.count("num_slots", least=1) > MAX_SLOTS:
            raise reader.error("num_slots", f"expected at most {MAX_SLOTS}")
        return cls(
            **reader.scalars(cls),
            ranks=reader.ranks("ranks"),
            manifest=_manifest_template(reader.section("manifest")),
        )


def _manifest_template(reader: JsonObject) -> ManifestTemplate:
    reader.check_names(ManifestTemplate)
    mesh, versions = CheckpointMesh.read(reader.section("mesh")), reader.section("versions")
    versions.check_names(CheckpointVersions)
    return ManifestTemplate(
        **reader.scalars(ManifestTemplate),
        config=reader.mapping("config"),
        mesh=mesh,
        versions=CheckpointVersions(**versions.scalars(CheckpointVersions)),
        data=SampleStream.read(reader.section("data")),
    )


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The image of a rank's data file: the first `image_bytes` of the contents of the rank's slot.

    `items` are (offset, length). The plan applies only to a slot with this `plan_digest` in its header; any other slot
    is from an earlier layout of the job.
    """

    rank: int
    image_bytes: int
    plan_digest: bytes
    items: tuple[tuple[int, int], ...]
    schema_version: int = PLAN_SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Put the plan in place. Raises: CheckpointError naming the file."""
        _write(path, {**asdict(self), "plan_digest": self.plan_digest.hex()})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the plan in a file. Raises: MissingFileError; CheckpointError naming the file and the field."""
        reader = _read(path, cls)
        image_bytes = reader.count("image_bytes")
        return cls(
            rank=reader.count("rank"),
            image_bytes=image_bytes,
            plan_digest=reader.digest("plan_digest"),
            items=reader.ranges("items", image_bytes),
        )


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """The identity of a host's writer process, and its results.

    `num_persisted` and `num_failures` count since this process started. `num_failed` counts the failures since the last
    success, or since the arena was created, also those of earlier writer processes. `last_error` is "" when the last
    write succeeded. `failing_unix_s` is the time of the first of the `num_failed` failures, `persisted_unix_s` the time
    of the last commit. `last_write_s` and `last_write_bytes` describe the last successful write of this host's files,
    from the first byte until they were durable.
    """

    pid: int
    branch: str
    round: int
    num_persisted: int
    num_failures: int
    last_persisted_step: int | None
    last_error: str
    last_write_s: float
    last_write_bytes: int
    num_failed: int = 0
    failing_unix_s: float | None = None
    persisted_unix_s: float | None = None
    schema_version: int = PLAN_SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Put the status in place. Raises: CheckpointError naming the file."""
        _write(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the status in a file. Raises: MissingFileError; CheckpointError naming the file and the field."""
        reader = _read(path, cls)
        reader.count("pid", least=1)
        return cls(**reader.scalars(cls))


class _PlanObject(JsonObject):
    """A JSON object with readers for the lists in plans."""

    def _list(self, name: str, kind: type, rule: str) -> list[Any]:
        values = self._raw.get(name)
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self.error(name, rule)
        return values

    def ranks(self, name: str) -> tuple[int, ...]:
        rule = "expected a list of ranks, ascending, at least one"
        ranks = tuple(self._list(name, int, rule))
        if not ranks or ranks[0] < 0 or any(later <= rank for rank, later in pairwise(ranks)):
            raise self.error(name, rule)
        return ranks

    def ranges(self, name: str, image_bytes: int) -> tuple[tuple[int, int], ...]:
        rule = "expected a list of [offset, length]"
        ranges: list[tuple[int, int]] = []
        for pair in self._list(name, list, rule):
            if [type(value) for value in pair] != [int, int]:
                raise self.error(name, rule)
            ranges.append((pair[0], pair[1]))
        problem = item_ranges_problem(ranges, image_bytes)
        if problem is not None:
            raise CheckpointError(f"{self._location}: {name} has {problem}; {_DAMAGE}")
        return tuple(ranges)

    def digest(self, name: str) -> bytes:
        text = self.text(name)
        with suppress(ValueError):
            digest = bytes.fromhex(text)
            if len(digest) == PLAN_DIGEST_BYTES and digest.hex() == text:
                return digest
        raise self.error(name, f"expected {2 * PLAN_DIGEST_BYTES} hexadecimal digits")


def _read(path: Path, kind: type) -> _PlanObject:
    try:
        # do not block if the name belongs to something else, such as a FIFO
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            content = file.read()
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    reader = _PlanObject.parse(content, str(path), PLAN_SCHEMA_VERSION, _DAMAGE)
    reader.check_names(kind)
    return reader


def _write(path: Path, raw: Mapping[str, Any]) -> None:
    """Replace a whole file. Does not create the directory: a removed arena must stay removed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write((json.dumps(raw, sort_keys=True) + "\n").encode())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
