"""Full activation recompute: keep each block's input only and run the block again in backward.

The cheaper kind (`parallel.recompute = "selective"`) is part of the tensor plan, through the Rematerializer.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_fully(block: nn.Module) -> None:
    """Let backward run `block` again. Its dropout draws the same masks, because they depend on place alone."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
