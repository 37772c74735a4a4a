"""How many elements a loop treats at once, so that its temporaries stay small.

Below both the loops and the memory estimate, which counts these temporaries ahead.
"""

from __future__ import annotations

LOSS_BLOCK_ELEMENTS = 1 << 20
"""Logits of the loss, where it needs them in a wider type: some MB."""
ADAMW_BLOCK_ELEMENTS_ON_CPU = 1 << 18
"""Of a share in AdamW: block and temporaries stay in a CPU's cache, and no fresh memory is touched."""
