"""Full recompute: keep only each block's input, and run the block again in backward.

Selective recompute (`parallel.recompute = "selective"`) is cheaper. It is part of the tensor plan
(selective_recompute.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatrain.ops.residual import ResidualStream


def recompute_fully(block: nn.Module) -> None:
    """Make backward run `block` again. Dropout draws the same masks, because a mask depends only on its position.

    The residual stream is added up at both ends of the block, so that one tensor is kept instead of two.
    """
    forward = block.forward

    def run_block(x_SBH: Tensor, *rest: Any) -> Tensor:
        return forward(ResidualStream(x_SBH), *rest).total()

    def run(stream: ResidualStream, *rest: Any) -> ResidualStream:
        total = checkpoint(run_block, stream.total(), *rest, use_reentrant=False, preserve_rng_state=False)
        return ResidualStream(total)

    block.forward = run
