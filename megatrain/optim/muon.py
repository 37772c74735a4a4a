"""Muon: the momentum of each matrix between hidden states, orthogonalized (Keller Jordan, Muon, 2024).

A matrix is orthogonalized as a whole by one rank of its stage, which gets its parts from the ranks that hold them and
returns the results (parallel/matrix_exchange.py). Every layout computes the same: q, k and v of all heads are a matrix
each, and so are gate and up. An update is scaled to the usual size of an AdamW update, 0.2 * sqrt(max(rows, columns)),
so that both share a learning rate and a weight decay (Moonlight, arXiv:2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatrain.comm.group import Group
from megatrain.config.optimizer import OptimizerConfig
from megatrain.optim.state import ShardState
from megatrain.parallel.logical_matrices import LogicalMatrix
from megatrain.parallel.matrix_exchange import matrix_exchanges

RMS_OF_ADAMW = 0.2


class Muon:
    """The updates of all shards of hidden weights. along: this rank's groups by axis."""

    def __init__(self, states: Sequence[ShardState], config: OptimizerConfig, along: Mapping[str, Group]) -> None:
        self._states = tuple(states)
        self._config = config
        self._exchanges = matrix_exchanges([state.bucket for state in states], along, config.muon_precision)

    def update_(self, gradients: Sequence[Tensor], lr: float, gradient_scale: float) -> None:
        """Update all shards of state in place with gradients times `gradient_scale`, and their parameters too.

        The directions overwrite the gradients.
        Communication: MatrixExchange.orthogonalize_, once for each exchange.
        """
        momentum = self._config.momentum
        for state, gradient in zip(self._states, gradients, strict=True):
            average = state.of("exp_avg").lerp_(gradient.mul_(gradient_scale), 1.0 - momentum)
            if self._config.has_nesterov:
                gradient.lerp_(average, momentum)
            else:
                gradient.copy_(average)
        for exchange in self._exchanges:
            exchange.orthogonalize_(gradients, update_scale)
        for state, direction in zip(self._states, gradients, strict=True):
            state.move_(direction, lr)


def update_scale(matrix: LogicalMatrix) -> float:
    """Return the factor by which an orthogonalized matrix is multiplied. Without it, the root mean square of the matrix
    is 1 / sqrt(max(rows, columns))."""
    return RMS_OF_ADAMW * math.sqrt(max(matrix.num_rows, matrix.num_columns))
