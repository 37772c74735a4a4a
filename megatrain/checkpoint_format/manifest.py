"""The manifest of a checkpoint: the job's progress, the writer, and each file with its size and digest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatrain.checkpoint_format.checkpoint_names import manifest_name, name_in_round
from megatrain.checkpoint_format.location import is_relative_name
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.layout import SIZED_AXES, Layout

MANIFEST_SCHEMA_VERSION = 7
_DIGEST = re.compile(r"(items-)?sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CheckpointMesh:
    """The layout of the job that wrote a checkpoint. A job of any other layout can read the checkpoint."""

    layout: Layout
    num_chunks: int

    def to_dict(self) -> dict[str, int]:
        """Return the mesh in its form in files: the size of each listed axis, and num_chunks."""
        return {**self.layout.sizes, "num_chunks": self.num_chunks}

    @classmethod
    def read(cls, reader: JsonObject) -> Self:
        """Return the mesh in a JSON object. Raises: CheckpointError naming the field."""
        reader.check_known(["num_chunks", *(axis.size_name for axis in SIZED_AXES)])
        size_names = [axis.size_name for axis in SIZED_AXES if axis.is_always_listed or axis.size_name in reader]
        sizes = {name: reader.count(name, least=1) for name in size_names}
        try:
            layout = Layout(**sizes)
        except TopologyError as error:
            raise reader.error(size_names[-1], str(error)) from error
        return cls(layout, reader.count("num_chunks", least=1))


@dataclass(frozen=True, slots=True)
class CheckpointVersions:
    """The programs that wrote a checkpoint."""

    megatrain: str
    torch: str
    python: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint. `size` in bytes.

    `digest` is "sha256:<hex>" of the whole file, or "items-sha256:<hex>" of the list of items that ends a data file.
    """

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The origin of a checkpoint, and the required sizes and digests of its files.

    `consumed_samples` is the cursor in the sample order. `num_updates` counts the optimizer's updates: `step` minus the
    `num_skipped` steps that were not finite. `round` is the round that wrote the checkpoint. Without the optimizer's
    moments (`has_optimizer` is false), training starts from the weights alone. `files` maps paths relative to the
    directory to sizes and digests. The manifest, COMMIT and PINNED are not listed.
    """

    job: str
    branch: str
    round: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    num_updates: int
    num_skipped: int
    written_unix_s: float
    has_optimizer: bool
    data: SampleStream
    mesh: CheckpointMesh
    config_hash: str
    config: Mapping[str, Any]
    versions: CheckpointVersions
    files: Mapping[str, FileEntry]
    schema_version: int = MANIFEST_SCHEMA_VERSION

    def name_of(self, name: str) -> str:
        """Return a file's name in this checkpoint: with the round, or `name` itself if a conversion wrote it."""
        in_round = name_in_round(name, self.round)
        return in_round if in_round in self.files or name not in self.files else name

    def file_name(self) -> str:
        """Return the name of the file that holds this manifest."""
        return manifest_name(self.to_json().encode(), self.round)

    def to_json(self) -> str:
        raw = {**asdict(self), "mesh": self.mesh.to_dict()}
        return json.dumps(raw, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, content: bytes | str, location: str) -> Self:
        """Parse the manifest in `content`; `location` names the file in errors.

        Raises: CheckpointError naming the file and the field that is missing, unknown or of a wrong kind.
        """
        reader = JsonObject.parse(content, location, MANIFEST_SCHEMA_VERSION, "the checkpoint is damaged")
        reader.check_names(cls)
        versions = reader.section("versions")
        versions.check_names(CheckpointVersions)
        return cls(
            **reader.scalars(cls),
            data=SampleStream.read(reader.section("data")),
            mesh=CheckpointMesh.read(reader.section("mesh")),
            config=reader.mapping("config"),
            versions=CheckpointVersions(**versions.scalars(CheckpointVersions)),
            files=_files(reader.section("files")),
        )


def _files(reader: JsonObject) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for path in reader:
        if not is_relative_name(path):
            raise reader.error(path, "expected a path inside the checkpoint directory")
        entry = reader.section(path)
        entry.check_names(FileEntry)
        digest = entry.text("digest")
        if not _DIGEST.fullmatch(digest):
            raise entry.error("digest", "expected sha256: or items-sha256: and 64 hexadecimal digits")
        files[path] = FileEntry(entry.count("size"), digest)
    return files
