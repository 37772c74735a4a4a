"""A source of training samples: its tokens and pictures, the order of its samples, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.config.model_products import DocumentCost
from megatrain.data.costs import DocumentCosts
from megatrain.data.patches import SamplePictures
from megatrain.data.producer_work import ProducerWorks
from megatrain.data.sample_costs import recorded_costs, sample_costs
from megatrain.data.token_stream import SourceOrder, TokenStream


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """Tokens that samples come from, and their order.

    section: the section of the configuration. max_epochs: how often each token may be read; 0: as often as needed.
    costs: the costs by which samples are dealt; None: those of the reader. pictures: of its samples; None if they have
    none. prepare: returns a source that has what these samples need, for a source that must first ask for it; None:
    the source has it. works: what each producer did for that.
    """

    identity: StreamSource
    dataset: TokenStream
    order: SourceOrder
    section: str = ""
    max_epochs: float = 0.0
    costs: DocumentCosts | None = None
    pictures: SamplePictures | None = None
    prepare: Callable[[TrainingSource, NDArray[np.int64]], TrainingSource] | None = None
    works: ProducerWorks = ()

    def prepared(self, indices: NDArray[np.int64]) -> TrainingSource:
        """Return the source for reading these samples, by their numbers in its order. Raises: as `prepare`."""
        return self if self.prepare is None else self.prepare(self, indices)

    def sample_costs(self, cost: DocumentCost | None, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of samples by their numbers in the order of the source. Shapes: all [samples].

        cost: by the lengths of the documents, for a source without costs.
        """
        if self.costs is not None:
            return recorded_costs(self.costs, self.order, indices)
        assert cost is not None, "a source without costs in a reader without a cost"
        return sample_costs(cost, self.dataset, self.order, indices)
