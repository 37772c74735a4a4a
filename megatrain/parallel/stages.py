"""How layers are dealt to stages and chunks: evenly, model chunk k = chunk * pp_size + stage holding the k-th share."""

from __future__ import annotations


def chunk_layers(num_layers: int, pp_size: int, num_chunks: int, stage: int, chunk: int) -> range:
    """Return the global numbers of the layers of one chunk on one stage."""
    share = num_layers // (pp_size * num_chunks)
    first = (chunk * pp_size + stage) * share
    return range(first, first + share)
