"""The checkpoints of a job: a directory a step, complete when its COMMIT is there.

All ranks write their boxes; rank 0 then writes the manifest and, last, COMMIT. A save that dies on the way leaves a
directory without COMMIT, which nobody reads and the next save of that step replaces.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import megatrain
from megatrain.checkpoint.continuation import Continuation, Progress, continuation, origin_of
from megatrain.checkpoint.store import load_boxes, save_boxes
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.config.serialize import config_hash
from megatrain.contracts.checkpoint_files import (
    is_committed,
    read_manifest,
    step_directory_name,
    write_commit,
    write_manifest,
    wrong_files,
)
from megatrain.contracts.errors import CheckpointError, CommunicationError
from megatrain.contracts.lineage import MAIN_BRANCH, candidates, current_branch, ensure_branch
from megatrain.contracts.location import LocalLocation
from megatrain.contracts.manifest import CheckpointMesh, CheckpointVersions, FileEntry, Manifest, SampleStream
from megatrain.contracts.operations import Operation
from megatrain.parallel.sharding import FlatShard

BRANCH = MAIN_BRANCH
TOKENIZER_NAME = "tokenizer.json"

Shards = Iterable[tuple[str, FlatShard, bool]]
"""(kind of state, shard, whether this rank is the one that saves it), as ShardedOptimizer.flat_shards yields."""


class JobCheckpoints:
    """Saves to and loads from one directory of checkpoints."""

    def __init__(self, directory: Path, config: Config, data: SampleStream, mesh: Mesh, incarnation: int) -> None:
        self._directory = directory
        self._data = data
        self._config = config
        self._mesh = mesh
        self._incarnation = incarnation

    def save(self, progress: Progress, shards: Shards) -> Path:
        """Write a checkpoint of this step and return its directory; the same on all ranks.

        Communication: all ranks take part and return when COMMIT is on disk.
        Raises: CheckpointError naming the directory; CommunicationError.
        """
        checkpoints = LocalLocation(self._directory)
        branch = current_branch(checkpoints)
        directory = self._directory / branch / step_directory_name(progress.step)
        if self._mesh.rank == 0:
            ensure_branch(checkpoints, "start of the run")
            _make_empty(directory)
        self._mesh.barrier()
        with self._naming_a_broken_exchange(Operation.CHECKPOINT, directory):
            save_boxes(directory, shards, is_alone=self._mesh.is_alone)
        if self._mesh.rank == 0:
            self._copy_tokenizer(directory)
            manifest = self._manifest(directory, branch, progress)
            write_manifest(LocalLocation(directory), manifest)
            write_commit(LocalLocation(directory), manifest)
        self._mesh.barrier()
        return directory

    def find(self) -> Path | None:
        """Return the checkpoint to start from, None for a fresh start.

        `checkpoint.load` names one; else the newest of this run, unless `checkpoint.resume` is off.
        Raises: CheckpointError when the named one is not complete, or the run's directory holds nothing loadable.
        """
        found = candidates(LocalLocation(self._directory))
        if found and self._config.checkpoint.resume:
            return Path(str(found[0].location))
        if found:
            raise CheckpointError(
                f"{self._directory} holds checkpoints up to {found[0].location.name}, but checkpoint.resume=false; "
                f"resume, or name another job.run_directory for a new run"
            )
        if not self._config.checkpoint.load:
            return None
        named = Path(self._config.checkpoint.load)
        if not is_committed(LocalLocation(named)):
            raise CheckpointError(
                f"checkpoint.load={str(named)!r} is not a complete checkpoint (no matching COMMIT); name a directory "
                f"like runs/<job>/checkpoints/{MAIN_BRANCH}/{step_directory_name(120)}"
            )
        return named

    def load(self, directory: Path, shards: Shards) -> Continuation:
        """Fill this rank's shards from a checkpoint of any layout and return where to go on.

        Communication: all ranks take part.
        Raises: CheckpointError naming the file or tensor; CommunicationError.
        """
        manifest = read_manifest(LocalLocation(directory))
        problems = wrong_files(LocalLocation(directory), manifest)
        if problems:
            raise CheckpointError(f"{directory} is damaged: {'; '.join(problems[:5])}")
        is_same_run = directory.is_relative_to(self._directory)
        found = continuation(origin_of(manifest, str(directory)), self._config, self._data, is_same_run=is_same_run)
        with self._naming_a_broken_exchange(Operation.CHECKPOINT_LOAD, directory):
            load_boxes(directory, shards, is_alone=self._mesh.is_alone)
        return found

    @contextmanager
    def _naming_a_broken_exchange(self, operation: Operation, directory: Path) -> Iterator[None]:
        """Say what was going on when torch's exchange of plans breaks off. A rank's own errors, it collects."""
        try:
            yield
        except RuntimeError as error:
            if self._mesh.is_alone:
                raise
            raise CommunicationError(
                f"{operation.value} {directory} on the group of all {self._mesh.layout.world_size} ranks failed on "
                f"rank {self._mesh.rank}: {error}"
            ) from error

    def _manifest(self, directory: Path, branch: str, progress: Progress) -> Manifest:
        layout = self._mesh.layout
        files = [path for path in directory.rglob("*") if path.is_file()]
        return Manifest(
            job=self._config.job.name,
            branch=branch,
            incarnation=self._incarnation,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            num_updates=progress.num_updates,
            num_skipped=progress.num_skipped,
            written_unix_s=time.time(),
            has_optimizer=True,
            data=self._data,
            mesh=CheckpointMesh(layout.tp_size, layout.pp_size, layout.dp_size, self._config.parallel.num_chunks),
            config_hash=config_hash(self._config),
            config=self._config.to_dict(),
            versions=CheckpointVersions(megatrain.__version__, torch.__version__, platform.python_version()),
            files={path.relative_to(directory).as_posix(): _entry(path) for path in sorted(files)},
        )

    def _copy_tokenizer(self, directory: Path) -> None:
        """A checkpoint brings its tokenizer along: text can be sampled from it anywhere."""
        if self._config.data.tokenizer:
            try:
                shutil.copyfile(self._config.data.tokenizer, directory / TOKENIZER_NAME)
            except OSError as error:
                raise CheckpointError(
                    f"cannot copy data.tokenizer={self._config.data.tokenizer!r} to {directory}: {error.strerror}"
                ) from error


def _entry(path: Path) -> FileEntry:
    try:
        with path.open("rb") as file:
            return FileEntry(path.stat().st_size, "sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read back: {error.strerror}") from error


def _make_empty(directory: Path) -> None:
    location = LocalLocation(directory)
    if is_committed(location):
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten")
    location.remove()
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {directory}: {error.strerror}") from error
