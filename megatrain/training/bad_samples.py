"""Samples that a run replaces because their tokens cannot be used: the ranks agree on them, count and log them.

The ranks of one replica read the same samples, perhaps from different disks. They must replace the same ones, or they
would compute with different tokens. So a step sums two kinds of numbers beside its loss: the replaced samples by
source, and a number that is 0 if the ranks of each replica have replaced the same samples. If it is not 0, nothing is
updated; the ranks exchange the numbers of the samples, replace all that any of them cannot read, and compute the step
again.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from megatrain.comm import Mesh
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain.contracts.log_messages import REPLACED_SAMPLES
from megatrain.data.bad_tokens import BadSample
from megatrain.data.masked_samples import without_samples
from megatrain.data.step_batch import StepBatch
from megatrain.ops.to_device import to_device
from megatrain.training.step import ReplacedSamples, StepOutcome

REPLACED_IN_A_ROW_LIMIT = 256
"""The run ends with an error when this many successive samples of a source were replaced."""

_logger = logging.getLogger(__name__)


def first_peer(layout: Layout, rank: int) -> tuple[int, int]:
    """Return the first of the ranks that work on the same samples as `rank`, and how many ranks these are."""
    own, _ = layout.sample_share(rank)
    peers = [other for other in range(layout.world_size) if layout.sample_share(other)[0] == own]
    return peers[0], len(peers)


def disagreement(samples: Sequence[BadSample], *, is_first: bool, num_peers: int) -> float:
    """Return this rank's part of a sum over all ranks that is 0 if the ranks of each replica have the same bad samples.

    is_first: whether this rank is the first of its peers; exactly one of `num_peers` is.
    """
    numbers = np.array([sample.number for sample in samples], dtype="<i8")
    # weights that add up to 0 over the peers; the sums of CRC-32 are exact in fp64 for a million ranks
    weight = 1 - num_peers if is_first else 1
    return float(weight * zlib.crc32(np.sort(numbers).tobytes())) if len(numbers) else 0.0


class BadSamples:
    """The replaced samples of a run, on one rank. names: the sources of the mixture."""

    def __init__(self, mesh: Mesh, names: Sequence[str]) -> None:
        self._mesh = mesh
        self._names = names
        first, self._num_peers = first_peer(mesh.layout, mesh.rank)
        self._is_first = first == mesh.rank
        self._logged: set[str] = set()
        self._in_a_row = [0] * len(names)

    def own_part(self, batch: StepBatch) -> ReplacedSamples:
        """Return this rank's part of the sums of a step."""
        difference = disagreement(batch.bad_samples, is_first=self._is_first, num_peers=self._num_peers)
        counts = [0.0] * len(self._names)
        if self._is_first:
            for sample in batch.bad_samples:
                counts[sample.source] += 1.0
        return ReplacedSamples(difference, tuple(counts))

    def agreed(self, batch: StepBatch, end: int) -> StepBatch:
        """Return the batch without the samples that any rank of this replica cannot read.

        end: the position of the run after the step. Communication: a small all-reduce per axis.
        """
        own = [sample.number - batch.cursor for sample in batch.bad_samples]
        flags = torch.zeros(end - batch.cursor, dtype=torch.float64)
        flags[own] = 1.0
        summed = self._mesh.sum_over_all(to_device(flags, self._mesh.device)).tolist()
        numbers = [batch.cursor + place for place, count in enumerate(summed) if count > 0.0]
        self._log(batch.bad_samples)
        return without_samples(batch, numbers)

    def after_step(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Log the replaced samples of a step on one rank of the replica, each address once.

        Raises: DataError, on all ranks, when too many samples of a source in a row were replaced.
        """
        if self._is_first:
            self._log(batch.bad_samples)
        tokens = {source.name: source.num_tokens for source in outcome.sources if source.num_tokens}
        for number, replaced in enumerate(outcome.num_replaced):
            name = self._names[number]
            # a run with one source or a custom loss does not count tokens by source
            is_used = name in tokens if tokens else outcome.num_label_tokens > 0
            self._in_a_row[number] = 0 if is_used else self._in_a_row[number] + replaced
            if self._in_a_row[number] >= REPLACED_IN_A_ROW_LIMIT:
                raise DataError(
                    f"{name or 'the training data'}: {self._in_a_row[number]} samples in a row cannot be used; the "
                    f'first of them are in the log. data.bad_samples="replace" allows {REPLACED_IN_A_ROW_LIMIT - 1}: '
                    "repair the files, or remove the source"
                )

    def _log(self, samples: Sequence[BadSample]) -> None:
        log_replaced(samples, self._names, self._logged)


def log_replaced(samples: Sequence[BadSample], names: Sequence[str], logged: set[str]) -> None:
    """Log the address of each replaced sample that is not in `logged` yet. names: of the sources, or empty."""
    for sample in samples:
        if sample.reason is None or sample.reason in logged:
            continue
        logged.add(sample.reason)
        source = f" of source {names[sample.source]}" if names[sample.source] else ""
        _logger.warning(
            "%ssample %d%s is replaced by one without labels: %s",
            REPLACED_SAMPLES, sample.number, source, sample.reason,
        )  # fmt: skip
