"""The checkpoints of a job: a directory a step, complete when its COMMIT is there.

All ranks write their boxes; rank 0 then writes the manifest and, last, COMMIT. A save that dies on the way leaves a
directory without COMMIT, which nobody reads and the next save of that step replaces.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import megatrain
from megatrain.checkpoint.store import load_boxes, save_boxes
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.config.serialize import config_hash
from megatrain.contracts.checkpoint_files import (
    COMMIT_NAME,
    MANIFEST_NAME,
    CheckpointMesh,
    CheckpointVersions,
    Manifest,
    is_committed,
    newest_committed,
    read_manifest,
    step_directory_name,
    write_commit,
    write_manifest,
    wrong_files,
)
from megatrain.contracts.errors import CheckpointError, CommunicationError
from megatrain.contracts.operations import Operation
from megatrain.parallel.sharding import FlatShard

BRANCH = "main"
TOKENIZER_NAME = "tokenizer.json"

Shards = Iterable[tuple[str, FlatShard, bool]]
"""(kind of state, shard, whether this rank is the one that saves it), as ShardedOptimizer.flat_shards yields."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come. `num_updates` is below `step` by the skipped steps."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    num_updates: int = 0
    num_skipped: int = 0


class JobCheckpoints:
    """Saves to and loads from one directory of checkpoints."""

    def __init__(self, directory: Path, config: Config, mesh: Mesh, incarnation: int) -> None:
        self._directory = directory
        self._config = config
        self._mesh = mesh
        self._incarnation = incarnation

    def save(self, progress: Progress, shards: Shards) -> Path:
        """Write a checkpoint of this step and return its directory; the same on all ranks.

        Communication: all ranks take part and return when COMMIT is on disk.
        Raises: CheckpointError naming the directory; CommunicationError.
        """
        directory = self._directory / step_directory_name(progress.step)
        if self._mesh.rank == 0:
            _make_empty(directory)
        self._mesh.barrier()
        with self._naming_a_broken_exchange(Operation.CHECKPOINT, directory):
            save_boxes(directory, shards, is_alone=self._mesh.is_alone)
        if self._mesh.rank == 0:
            self._copy_tokenizer(directory)
            write_manifest(directory, self._manifest(directory, progress))
            write_commit(directory)
        self._mesh.barrier()
        return directory

    def find(self) -> Path | None:
        """Return the checkpoint to start from, None for a fresh start.

        `checkpoint.load` names one; else the newest of this run, unless `checkpoint.resume` is off.
        Raises: CheckpointError when the named one is not complete, or the run's directory holds nothing loadable.
        """
        newest = newest_committed(self._directory)
        if newest is not None and self._config.checkpoint.resume:
            return newest
        if newest is not None:
            raise CheckpointError(
                f"{self._directory} holds checkpoints up to {newest.name}, but checkpoint.resume=false; resume, or "
                f"name another job.run_directory for a new run"
            )
        if not self._config.checkpoint.load:
            return None
        named = Path(self._config.checkpoint.load)
        if not is_committed(named):
            raise CheckpointError(
                f"checkpoint.load={str(named)!r} is not a complete checkpoint (no matching COMMIT); name a directory "
                f"like runs/<job>/checkpoints/{step_directory_name(120)}"
            )
        return named

    def load(self, directory: Path, shards: Shards) -> Progress:
        """Fill this rank's shards from a checkpoint of any layout and return how far it had come.

        Communication: all ranks take part.
        Raises: CheckpointError naming the file or tensor; CommunicationError.
        """
        manifest = read_manifest(directory)
        problems = wrong_files(directory, manifest)
        if problems:
            raise CheckpointError(f"{directory} is damaged: {'; '.join(problems[:5])}")
        with self._naming_a_broken_exchange(Operation.CHECKPOINT_LOAD, directory):
            load_boxes(directory, shards, is_alone=self._mesh.is_alone)
        return Progress(
            step=manifest.step,
            consumed_samples=manifest.consumed_samples,
            consumed_tokens=manifest.consumed_tokens,
            num_updates=manifest.num_updates,
            num_skipped=manifest.num_skipped,
        )

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

    def _manifest(self, directory: Path, progress: Progress) -> Manifest:
        layout = self._mesh.layout
        names = {MANIFEST_NAME, COMMIT_NAME}
        files = [path for path in directory.rglob("*") if path.is_file() and path.name not in names]
        return Manifest(
            job=self._config.job.name,
            branch=BRANCH,
            incarnation=self._incarnation,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            num_updates=progress.num_updates,
            num_skipped=progress.num_skipped,
            mesh=CheckpointMesh(layout.tp_size, layout.pp_size, layout.dp_size, self._config.parallel.num_chunks),
            config_hash=config_hash(self._config),
            config=self._config.to_dict(),
            versions=CheckpointVersions(megatrain.__version__, torch.__version__, platform.python_version()),
            files={path.relative_to(directory).as_posix(): path.stat().st_size for path in sorted(files)},
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


def _make_empty(directory: Path) -> None:
    if is_committed(directory):
        raise CheckpointError(f"{directory} is a complete checkpoint already and is not overwritten")
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {directory}: {error.strerror}") from error
