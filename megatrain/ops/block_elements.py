"""How many elements a loop of an operation's plain form treats at once, so that its temporaries stay small."""

from __future__ import annotations

LOSS_BLOCK_ELEMENTS = 1 << 20
"""Logits of the loss, where it needs them in a wider type: some MB."""
OPTIMIZER_BLOCK_ELEMENTS_ON_CPU = 1 << 18
"""Of a share that an optimizer updates: block and temporaries stay in a CPU's cache, and no fresh memory is touched."""
SQUARE_SUM_BLOCK_ELEMENTS_ON_CPU = 1 << 16
"""Of a flat tensor that is summed in fp64: the fastest of the sizes tried."""
