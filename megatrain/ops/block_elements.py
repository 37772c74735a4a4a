"""How many elements a plain torch form of an operation processes at once, so that its temporaries stay small."""

from __future__ import annotations

LOSS_BLOCK_ELEMENTS = 1 << 20
"""Logits that the loss converts to a wider dtype at once: some MB."""
OPTIMIZER_BLOCK_ELEMENTS_ON_CPU = 1 << 18
"""Elements of a shard that an optimizer updates at once.

The block and its temporaries stay in a CPU's cache, and no fresh memory is touched.
"""
SQUARE_SUM_BLOCK_ELEMENTS_ON_CPU = 1 << 16
"""Elements of a flat tensor that are summed in fp64 at once: the fastest of the sizes that were tried."""
