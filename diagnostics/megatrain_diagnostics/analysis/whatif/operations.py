"""The input of what-if analysis: the operations of some steps, reduced over tensor parallelism, as flat columns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.events.tables import Float64, Int64

PUBLIC_NAMES = {"num_chunks": "vpp_size"}
"""Field of JobShape -> name in the public format, if different."""


def ranks_per_row(world_size: int, num_cells: int) -> int:
    """Return how many ranks are combined into a row: the ranks of a stage that compute the same samples together.

    num_cells: the pairs of a data-parallel rank and a stage.
    """
    return world_size // num_cells


@dataclass(frozen=True, slots=True)
class JobShape:
    """Sizes of the job; in the public format they are in a file beside the trace.

    Raises: DataError for inconsistent sizes.
    """

    trial_name: str
    run_id: int = 0
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    dsp_size: int = 1
    """Number of ranks that share the sequences of a data-parallel rank (context parallelism) and are one row."""
    num_chunks: int = 1
    """Chunks of a stage."""
    world_size: int = 1

    def __post_init__(self) -> None:
        for name, size in self.public().items():
            if name.endswith("_size") and size < 1:
                raise DataError(f"{name}={size} of job {self.trial_name!r} must be at least 1")
        ranks = self.dp_size * self.pp_size * self.tp_size * self.dsp_size
        if ranks != self.world_size:
            raise DataError(
                f"world_size={self.world_size} of job {self.trial_name!r} must be "
                f"dp_size * pp_size * tp_size * dsp_size = {ranks}"
            )

    def public(self) -> dict[str, Any]:
        """Return the values by their names in the public format."""
        return {PUBLIC_NAMES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class OperationTable:
    """One row per operation of a (data-parallel rank, stage). Shapes: all columns [rows]; times in seconds.

    Times of the same step must have a common zero. Chunk and micro-batch are -1 for operations without them.
    """

    kinds: tuple[str, ...]
    """Names that `kind` indexes."""
    dp_rank: Int64
    stage: Int64
    rank: Int64
    step: Int64
    kind: Int64
    start_s: Float64
    duration_s: Float64
    sequence: Int64
    """Index among the operations of this kind in this step of this rank, by start, from 0."""
    chunk: Int64
    """Index of the chunk on its stage."""
    model_chunk: Int64
    """Index of the chunk in the whole model."""
    microbatch: Int64

    @property
    def num_rows(self) -> int:
        return len(self.step)

    def where(self, chosen: NDArray[np.bool_]) -> OperationTable:
        """Return the rows that a mask selects."""
        columns = {field.name: getattr(self, field.name)[chosen] for field in fields(self) if field.name != "kinds"}
        return OperationTable(kinds=self.kinds, **columns)

    def between(self, first_step: int | None, last_step: int | None) -> OperationTable:
        """Return the rows from `first_step` to `last_step`, inclusive; None: no bound."""
        if first_step is None and last_step is None:
            return self
        chosen = np.ones(self.num_rows, dtype=bool)
        if first_step is not None:
            chosen &= self.step >= first_step
        if last_step is not None:
            chosen &= self.step <= last_step
        return self.where(chosen)
