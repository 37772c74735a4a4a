"""The cost of samples, from the lengths of their documents or from a file with the cost of each document.

Only the index of the tokens is read, not the tokens. By lengths: attention stays within documents, so its cost grows
with the square of their lengths, or with the size of a window. All other costs grow with the number of tokens. Padding
at the end of a sample is computed like a document.
Costs are integers, in the unit of DocumentCost or of the file.
"""

from __future__ import annotations

import numpy as np

from megatrain.config.model_products import DocumentCost
from megatrain.data.costs import DocumentCosts
from megatrain.data.indexed import IndexedDataset
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


def sample_costs(
    cost: DocumentCost, dataset: TokenStream, order: SourceOrder, indices: Int64, num_patches: int = 0
) -> Int64:
    """Return the cost of samples of one source. indices: their numbers in its order. Shapes: all [samples].

    num_patches: the rows of each sample's picture, which belong to its first document. The cost of encoding the picture
    is left out. Raises: DataError when the file of packed samples is damaged at these samples.
    """
    lengths, bounds = _documents(dataset, order, indices)
    if num_patches:
        lengths[bounds[:-1][np.diff(bounds) > 0]] += num_patches
    # the sum of a sample is the difference of two running sums, also for a sample without documents
    sums = np.concatenate([[0], np.cumsum(length_costs(cost, lengths))])
    num_tokens = np.concatenate([[0], np.cumsum(lengths)])
    padding = order.lengths(indices) - np.diff(num_tokens[bounds])
    costs: Int64 = np.diff(sums[bounds]) + length_costs(cost, padding)
    return costs


def recorded_costs(costs: DocumentCosts, order: SourceOrder, indices: Int64) -> Int64:
    """Return the cost of samples of one source by the costs of its documents. Shapes: all [samples].

    A sample has the same part of a document's cost as of its labels. Padding costs nothing.
    Raises: DataError when the costs or the packed samples are damaged at these samples.
    """
    pieces = order.pieces(indices)
    is_packed = isinstance(order, PackedOrder)
    found = [
        _piece_cost(costs, costs.dataset, start, end, is_packed=is_packed)
        for start, end in zip(pieces.starts.tolist(), (pieces.starts + pieces.labels).tolist(), strict=True)
    ]
    sums = np.concatenate([[0], np.cumsum(np.array(found, dtype=np.int64))])
    of_samples: Int64 = np.diff(sums[pieces.bounds])
    return of_samples


def _piece_cost(costs: DocumentCosts, dataset: IndexedDataset, start: int, end: int, *, is_packed: bool) -> int:
    """Return the cost of the labels of the tokens from `start` to `end` - 1. The costs of all pieces of a document add
    up to its cost."""
    first = dataset.document_of(start)
    last = first + len(dataset.document_starts_between(start + 1, end))
    bounds = dataset.document_starts(first, last + 2)
    # the last token of a packed document is only a label
    lengths = np.maximum(np.diff(bounds) - is_packed, 1)
    before, through = (np.clip(place - bounds[:-1], 0, lengths) for place in (start, end))
    of_documents = costs.read(first, last + 1)
    # rounded down at both ends, so that no part is lost between two pieces
    return int((of_documents * through // lengths - of_documents * before // lengths).sum())


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
