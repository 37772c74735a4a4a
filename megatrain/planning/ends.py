"""The memory of the model's two ends: the embedding, and the head with the loss.

Follows megatrain/model/embedding.py and head.py with the styles of the tensor plan, as blocks.py does for the blocks.
"""

from __future__ import annotations

from megatrain.config.config import Config
from megatrain.ops.block_elements import LOSS_BLOCK_ELEMENTS
from megatrain.planning.blocks import norm_backward, norm_forward, norm_kept
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
        backward.visit(sizes.hidden_local // config.batch.micro_batch_size, sizes.position_weight)
    if sizes.is_tp:
        backward.hold(sizes.hidden)
        backward.release(sizes.hidden_local)
    backward.hold(sizes.word_weight)
    if sizes.is_on_cpu:
        # rows are summed in a table of their own, and where sums have another type beside the rows in that type
        wide = sizes.sum_element // sizes.element
        backward.visit(wide * sizes.word_weight, wide * sizes.hidden if sizes.is_mixed else 0)
    return Footprint(kept, forward.peak, backward.peak)


def head_footprint(config: Config, sizes: TensorBytes, *, is_tied_here: bool) -> Footprint:
    """Return the footprint of the final norm, the logits and the loss.

    is_tied_here: the word embedding of this chunk is the head's weight. Its gradient then waits for the embedding's.
    """
    is_selective = config.parallel.recompute == "selective"
    # the head is outside of the blocks that full recompute runs again, so it always has its recipes
    inner = 0 if is_selective else sizes.hidden_local
    again = sizes.hidden if sizes.is_tp else sizes.hidden_local - inner
    wide_block = 0
    if sizes.is_mixed:
        wide_block = min(LOSS_BLOCK_ELEMENTS, sizes.logits // sizes.element) * sizes.sum_element
    num_statistics = 3 if config.train.label_smoothing else 2
    sums = num_statistics * config.batch.micro_batch_size * config.model.seq_len * sizes.sum_element
    kept = norm_kept(config, sizes) + inner + sizes.logits + sums

    forward = Ledger(norm_kept(config, sizes))
    norm_forward(config, sizes, forward)
    if sizes.is_tp:
        forward.hold(sizes.hidden)
    forward.hold(sizes.logits, sums)
    forward.visit(wide_block)

    backward = Ledger(kept)
    backward.visit(wide_block)
    backward.hold(again, sizes.hidden, sizes.word_weight)
    backward.release(sizes.logits, again, inner)
    if not is_tied_here:
        backward.release(sizes.word_weight)
    if sizes.is_tp:
        backward.hold(sizes.hidden_local)
        backward.release(sizes.hidden)
    norm_backward(config, sizes, backward)
    return Footprint(kept, forward.peak, backward.peak, left=sizes.word_weight if is_tied_here else 0)
