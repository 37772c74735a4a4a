"""The sources of the samples of a step, and sums over the samples of each source.

Legend: M micro-batches of a rank, B micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SampleSources:
    """The sources of one rank's samples of a step.

    names: the names of all sources of the mixture, "" for a source that gets no more samples. source_MB: the index in
    `names` of each sample's source. num_labels_MB: how many tokens of the sample have a loss. Shapes: [M, B].
    """

    names: tuple[str, ...]
    source_MB: NDArray[np.int64]
    num_labels_MB: NDArray[np.int64]

    def sums(self, losses_MB: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return the summed loss of each source, and its number of tokens with a loss; zeros if `losses_MB` is None.

        Shapes: losses [M, B]; result [2, number of sources].
        """
        if losses_MB is None:
            return np.zeros((2, len(self.names)))
        sources = self.source_MB.ravel()
        weights = (losses_MB.ravel(), self.num_labels_MB.ravel())
        return np.stack([np.bincount(sources, weight, minlength=len(self.names)) for weight in weights])
