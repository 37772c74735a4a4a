"""Full activation recompute: keep each block's input only and run the block again in backward.

The cheaper kind (`parallel.recompute = "selective"`) is part of the tensor plan, through the Rematerializer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatrain.ops.residual import ResidualStream


def recompute_fully(block: nn.Module) -> None:
    """Let backward run `block` again. Its dropout draws the same masks, because they depend on place alone.

    The residual stream is added up at both ends of the block, so that one tensor is kept and not two.
    """
    forward = block.forward

    def run_block(x_SBH: Tensor, *rest: Any) -> Tensor:
        return forward(ResidualStream(x_SBH), *rest).total()

    def run(stream: ResidualStream, *rest: Any) -> ResidualStream:
        total = checkpoint(run_block, stream.total(), *rest, use_reentrant=False, preserve_rng_state=False)
        return ResidualStream(total)

    block.forward = run
