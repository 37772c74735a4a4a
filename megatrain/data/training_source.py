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
from megatrain.data.sample_costs import length_costs, recorded_costs, sample_costs
from megatrain.data.token_stream import SourceOrder, TokenStream


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """Tokens that samples come from, and their order.

    section: the section of the configuration. max_epochs: how often each token may be read; 0: as often as needed.
    costs: the costs by which samples are dealt; None: those of the reader. pictures: of its samples; None if they have
    none. prepare: gets numbers of samples, asks producers for what these samples need, and returns a source that has
    it; None if the source has it already. works: what each producer did for the preparation.
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

    @property
    def num_patches(self) -> int:
        """The patches of the picture that each sample begins with; 0 if samples have none."""
        return 0 if self.pictures is None else self.pictures.num_patches

    def sample_costs(
        self, cost: DocumentCost | None, indices: NDArray[np.int64], *, has_document_mask: bool
    ) -> NDArray[np.int64]:
        """Return the cost of samples by their numbers in the order of the source. Shapes: all [samples].

        cost: by the lengths of the documents and the picture, for a source without costs. Without a document mask, each
        sample counts as one document; so does a sample whose tokens must first be asked for.
        """
        if self.costs is not None:
            return recorded_costs(self.costs, self.order, indices)
        assert cost is not None, "a source without costs in a reader without a cost"
        if has_document_mask and self.prepare is None:
            of_rows = sample_costs(cost, self.dataset, self.order, indices, self.num_patches)
        else:
            of_rows = length_costs(cost, self.order.lengths(indices))
        return of_rows + cost.per_picture if self.pictures is not None else of_rows
