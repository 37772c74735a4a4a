"""Write boxes to a directory and read them back, through torch's distributed checkpoint.

Keys: `model.<parameter>` holds master weights, `optimizer.<kind>.<parameter>` the moments. What else a job needs to go
on (step, cursor, mesh) stands in the manifest, not here.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatrain.checkpoint.boxed_tensor import BoxedTensor
from megatrain.contracts.errors import CheckpointError, SaveError
from megatrain.parallel.sharding import FlatShard

MODEL_PREFIX = "model."


def save_boxes(directory: Path, shards: Iterable[tuple[str, FlatShard, bool]], *, is_alone: bool) -> None:
    """Write every shard that this rank owns. `shards` yields (kind of state, shard, owns it).

    Communication: plans are gathered to rank 0 and scattered, over the world group; all ranks call it together and
    return when all files are written. is_alone: there is no world group.
    Raises: SaveError naming the directory.
    """
    owned = ((kind, shard) for kind, shard, is_owner in shards if is_owner)
    try:
        with _Quiet():
            dcp.save(dict(_boxed(owned)), checkpoint_id=directory, no_dist=is_alone)
    except (OSError, dcp.CheckpointException) as error:
        raise SaveError(f"could not write the checkpoint {directory}: {_cause(error)}") from error


def load_boxes(directory: Path, shards: Iterable[tuple[str, FlatShard, bool]], *, is_alone: bool) -> None:
    """Fill every shard of this rank, whatever the layout was that wrote the checkpoint.

    Communication: as `save_boxes`.
    Raises: CheckpointError naming the directory and the tensor that is missing or of another shape.
    """
    wanted = _boxed((kind, shard) for kind, shard, _ in shards)
    _check_shapes(directory, {key: tuple(tensor.shape) for key, tensor in wanted.items()})
    try:
        with _Quiet():
            dcp.load(dict(wanted), checkpoint_id=directory, no_dist=is_alone)
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(f"could not read the checkpoint {directory}: {_cause(error)}") from error


def load_whole(directory: Path, parameters: Mapping[str, Tensor]) -> None:
    """Fill whole parameters from the master weights of a checkpoint, in one process.

    Raises: CheckpointError naming the directory and the tensor.
    """
    _check_shapes(directory, {MODEL_PREFIX + name: tuple(x.shape) for name, x in parameters.items()})
    full = {MODEL_PREFIX + name: torch.empty(x.shape, dtype=torch.float32) for name, x in parameters.items()}
    try:
        with _Quiet():
            dcp.load(dict(full), checkpoint_id=directory, no_dist=True)
    except (OSError, dcp.CheckpointException) as error:
        raise CheckpointError(f"could not read the checkpoint {directory}: {_cause(error)}") from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(full[MODEL_PREFIX + name])


def _boxed(shards: Iterable[tuple[str, FlatShard]]) -> dict[str, BoxedTensor]:
    by_key: dict[str, list[FlatShard]] = defaultdict(list)
    for kind, shard in shards:
        by_key[(MODEL_PREFIX if kind == "master" else f"optimizer.{kind}.") + shard.name].append(shard)
    return {key: BoxedTensor(members) for key, members in by_key.items()}


def _check_shapes(directory: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    try:
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointError(f"{directory} holds no readable checkpoint: {error}") from error
    for key, shape in wanted.items():
        entry = stored.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{directory} holds no tensor {key}; its model is not this configuration's: compare its manifest.json"
            )
        if tuple(entry.size) != shape:
            raise CheckpointError(
                f"{directory}: {key} has shape {tuple(entry.size)}, this configuration asks for {shape}; use the "
                f"[model] section of its manifest.json"
            )


def _cause(error: Exception) -> str:
    """Return the first rank's own error instead of torch's collection of tracebacks."""
    if isinstance(error, dcp.CheckpointException):
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return str(error)


class _Quiet:
    """Keep torch's advice on its own API out of the job's log for the length of a call."""

    def __enter__(self) -> None:
        self._catch = warnings.catch_warnings()
        self._catch.__enter__()
        warnings.simplefilter("ignore")
        self._logger = logging.getLogger("torch.distributed.checkpoint")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
        self._catch.__exit__(None, None, None)
