"""The memory of the model's two ends: the embedding, and the head with the loss.

Follows megatrain/model/embedding.py and head.py with the styles of the tensor plan, as blocks.py does for the blocks.
"""

from __future__ import annotations

from megatrain.config.config import Config
from megatrain.planning.blocks import norm_kept
from megatrain.planning.footprint import Footprint, Ledger
from megatrain.planning.tensor_bytes import TensorBytes


def embedding_footprint(config: Config, sizes: TensorBytes) -> Footprint:
    """Return the footprint of words, positions and dropout. The tokens themselves belong to the step's inputs."""
    has_positions = config.model.positions == "learned"
    kept = sizes.token_local if config.model.dropout else 0
    if sizes.is_tp:
        kept += sizes.token  # each token's local row

    forward = Ledger(kept)
    forward.hold(sizes.hidden)
    if sizes.is_tp:
        forward.hold(sizes.hidden_local)
        forward.release(sizes.hidden)
    if has_positions:
        forward.hold(sizes.hidden_local)
        forward.release(sizes.hidden_local)
    if config.model.dropout:
        forward.visit(sizes.hidden_local)

    backward = Ledger(kept)
    backward.hold(sizes.hidden_local)
    if config.model.dropout:
        backward.hold(sizes.hidden_local)
        backward.release(sizes.hidden_local)
    if has_positions:
        # summed over the micro-batch, then put in its place among all positions
        backward.visit(sizes.hidden_local // config.batch.micro_batch_size, sizes.position_gradient)
    if sizes.is_tp:
        backward.hold(sizes.hidden)
        backward.release(sizes.hidden_local)
    return Footprint(kept, forward.peak, backward.peak)


def head_footprint(config: Config, sizes: TensorBytes) -> Footprint:
    """Return the footprint of the final norm, the logits and the loss."""
    is_selective = config.parallel.recompute == "selective"
    # the head is outside of the blocks that full recompute runs again, so it always has its recipes
    inner = 0 if is_selective else sizes.hidden_local
    again = sizes.hidden if sizes.is_tp else sizes.hidden_local - inner
    num_statistics = 3 if config.train.label_smoothing else 2
    sums = num_statistics * config.batch.micro_batch_size * config.model.seq_len * sizes.sum_element
    kept = norm_kept(config, sizes) + inner + sizes.logits + sums

    forward = Ledger(norm_kept(config, sizes))
    forward.hold(sizes.hidden_local)  # the norm's output
    if sizes.is_tp:
        forward.hold(sizes.hidden)
    forward.hold(sizes.logits, sums)

    backward = Ledger(kept, is_split=sizes.is_split)
    backward.hold(again, sizes.hidden)
    if again:
        backward.release(inner)
    backward.release_factors(sizes.logits, again or inner)
    if sizes.is_tp:
        backward.hold(sizes.hidden_local)
        backward.release(sizes.hidden)
    backward.visit(sizes.hidden_local)  # the gradient of the norm's input
    return Footprint(kept, forward.peak, backward.peak, put_off=backward.put_off)
