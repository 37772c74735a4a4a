"""The cost of samples, from the lengths of their documents. Only the index of the tokens is read, not the tokens.

Attention stays within documents, so its cost grows with the square of their lengths, or with the size of a window. All
other costs grow with the number of tokens. Padding at the end of a sample is computed like a document.
Costs are integers in the unit of DocumentCost. This package loads no torch.
"""

from __future__ import annotations

import numpy as np

from megatrain.config.model_products import DocumentCost
from megatrain.data.order import PackedOrder
from megatrain.data.token_stream import Int64, SourceOrder, TokenStream


def length_costs(cost: DocumentCost, lengths: Int64) -> Int64:
    """Return the cost of documents of these lengths. Shapes: all [documents]. Units: lengths in tokens."""
    costs: Int64 = lengths * cost.per_token
    for window_size, num_layers in cost.windows:
        seen = np.minimum(lengths, window_size) if window_size else lengths
        costs = costs + num_layers * (seen * (seen + 1) // 2 + (lengths - seen) * seen)
    return costs


def sample_cost(cost: DocumentCost, seq_len: int) -> int:
    """Return the cost of a sample that is one document."""
    return int(length_costs(cost, np.array([seq_len], dtype=np.int64))[0])


def sample_costs(cost: DocumentCost, dataset: TokenStream, order: SourceOrder, indices: Int64) -> Int64:
    """Return the cost of samples of one source. indices: their numbers in its order. Shapes: all [samples].

    Raises: DataError when the file of packed samples is damaged there.
    """
    lengths, bounds = _documents(dataset, order, indices)
    # the sum of a sample is the difference of two running sums, also for a sample without documents
    sums = np.concatenate([[0], np.cumsum(length_costs(cost, lengths))])
    num_tokens = np.concatenate([[0], np.cumsum(lengths)])
    padding = order.lengths(indices) - np.diff(num_tokens[bounds])
    costs: Int64 = np.diff(sums[bounds]) + length_costs(cost, padding)
    return costs


def _documents(dataset: TokenStream, order: SourceOrder, indices: Int64) -> tuple[Int64, Int64]:
    """Return the lengths of the documents within samples. Those of sample n are from bounds[n] to bounds[n + 1].

    Shapes: indices [samples], lengths [documents], bounds [samples + 1].
    """
    pieces = order.pieces(indices)
    if isinstance(order, PackedOrder):
        return pieces.labels, pieces.bounds  # each piece lies in one document
    lengths = [np.zeros(0, np.int64)]
    for start, count in zip(pieces.starts.tolist(), pieces.labels.tolist(), strict=True):
        firsts = dataset.document_starts_between(start + 1, start + count)
        lengths.append(np.diff(firsts, prepend=start, append=start + count))
    # each piece begins a document
    ends = np.concatenate([[0], np.cumsum([len(one) for one in lengths[1:]])]).astype(np.int64)
    return np.concatenate(lengths), ends[pieces.bounds]
