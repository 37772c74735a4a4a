"""The memory of decoder blocks: norm, gathered sequence, mixers, and what is added to the stream.

Follows megatrain/model/block.py with the styles of the tensor plan in their places, as mixers.py does. Biases and
single numbers a token are counted where they are kept, not where they pass by.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.planning.footprint import Footprint, Ledger, in_a_row
from megatrain.planning.mixers import AttentionMemory, MlpMemory
from megatrain.planning.tensor_bytes import TensorBytes


def block_footprint(config: Config, sizes: TensorBytes) -> Footprint:
    """Return the footprint of one block."""
    recompute = config.parallel.recompute
    is_parallel = config.model.block == "parallel"
    mixers = ((True, True),) if is_parallel else ((True, False), (False, True))
    kind = ChunkedBranchMemory if has_sequence_chunks(config, sizes) else BranchMemory
    branches = [
        kind(
            config,
            sizes,
            has_attention,
            has_mlp,
            has_recipes=recompute != "full",
            # FP8 keeps inputs in 8 bits instead, whatever else is asked for
            is_selective=recompute == "selective" or config.fp8.is_used,
        ).footprint()
        for has_attention, has_mlp in mixers
    ]
    block = in_a_row(branches)
    eight_bits = fp8_inputs(config, sizes) + fp8_weights(config, sizes)
    block = Footprint(
        block.kept + eight_bits,
        block.forward + eight_bits,
        block.backward + eight_bits,
        put_off=block.put_off + fp8_inputs(config, sizes) * sizes.is_split,
    )
    if recompute != "full":
        return block
    # forward keeps nothing but the block's input; backward runs all of it, beside the gradient of its output
    gradient = sizes.hidden_local + sizes.hidden * sizes.is_tp
    kept = sizes.hidden_local
    return Footprint(
        kept,
        kept + max(branch.forward for branch in branches),
        max(block.forward + gradient, block.backward),
        put_off=block.put_off,
    )


def has_sequence_chunks(config: Config, sizes: TensorBytes) -> bool:
    """Whether branches exchange their rows chunk by chunk. With FP8, of which skipped layers are no part, none do."""
    return sizes.is_tp and config.parallel.num_sequence_chunks > 1 and not config.fp8.is_used


def fp8_inputs(config: Config, sizes: TensorBytes) -> int:
    """Return what the four products of a block keep of their inputs in 8 bits."""
    if not config.fp8.is_used:
        return 0
    return (2 * sizes.hidden + sizes.query + sizes.activation) // sizes.element


def fp8_weights(config: Config, sizes: TensorBytes) -> int:
    """Return what a backend keeps of a block's weights in 8 bits: Transformer Engine each one, and it transposed.

    The latter is not there on Blackwell and later.
    """
    if config.fp8.backend == "megatrain":
        return 0
    # the other side of each weight: what leaves the widening products, what enters the narrowing ones
    widths = (sizes.qkv + sizes.query + sizes.up + sizes.activation) // (sizes.rows * sizes.element)
    return 2 * widths * config.model.hidden_size


def fp8_staying(config: Config, sizes: TensorBytes) -> int:
    """Return what of both is never offloaded: Transformer Engine saves bytes as integers, which stay on the device."""
    return 0 if config.fp8.backend == "megatrain" else fp8_inputs(config, sizes) + fp8_weights(config, sizes)


@dataclass(frozen=True, slots=True)
class BranchMemory:
    """One branch on one rank.

    has_recipes: of a gathered sequence this rank's rows are kept; not so while a block is recomputed. is_selective:
    the norm's output is computed again too.
    """

    config: Config
    sizes: TensorBytes
    has_attention: bool
    has_mlp: bool
    has_recipes: bool
    is_selective: bool

    @property
    def kept(self) -> int:
        sizes = self.sizes
        tokens = sizes.token_local if self.config.model.dropout else 0
        mixers = self._attention.kept * self.has_attention + self._mlp.kept * self.has_mlp
        return norm_kept(self.config, sizes) + self._kept_inner + mixers + tokens

    def footprint(self) -> Footprint:
        backward = self._backward()
        return Footprint(self.kept, self._forward(), backward.peak, put_off=backward.put_off)

    def _forward(self) -> int:
        sizes = self.sizes
        ledger = Ledger(norm_kept(self.config, sizes))
        ledger.hold(sizes.hidden_local)  # the norm's output
        if sizes.is_tp:
            ledger.hold(sizes.hidden)
        if self.has_attention:
            self._attention.forward(ledger)
        if self.has_mlp:
            self._mlp.forward(ledger)
        if self.has_attention and self.has_mlp:
            ledger.hold(sizes.hidden)  # the sum, beside both
        if sizes.is_tp:
            ledger.visit(self._arriving)
            ledger.hold(sizes.hidden_local)
        ledger.hold(sizes.hidden_local)
        return ledger.peak

    def _backward(self) -> Ledger:
        sizes = self.sizes
        # the factors of FP8's products are those in 8 bits
        ledger = Ledger(self.kept, is_split=sizes.is_split and not sizes.is_fp8)
        ledger.hold(sizes.hidden_local)  # the gradient of the sum, which also goes past the branch
        own = 0  # the branch's gradient, where it is another tensor
        if self.config.model.dropout:
            own = sizes.hidden_local
            ledger.hold(own)
        if sizes.is_tp:
            ledger.hold(sizes.hidden)
            ledger.release(own)
            own = sizes.hidden
        inner = self._inner_again
        if self.has_mlp:
            self._mlp.backward(ledger, 0 if self.has_attention else own, inner)
        if self.has_attention:
            self._attention.backward(ledger, own, 0 if self.has_mlp else inner)
            if self.has_mlp:
                ledger.release(sizes.hidden)  # two gradients of one input became their sum
        if not own:
            ledger.share_factor(sizes.hidden_local)
        if inner:
            ledger.release(self._kept_inner)
        ledger.release_factors(inner or self._kept_inner)
        if sizes.is_tp:
            ledger.visit(self._arriving)
            ledger.hold(sizes.hidden_local)
            ledger.release(sizes.hidden)
        ledger.visit(sizes.hidden_local)  # the gradient of the norm's input
        return ledger

    @property
    def _arriving(self) -> int:
        """What a reduce-scatter of partial sums takes for a moment: its result, and on CPUs the parts of all ranks."""
        sizes = self.sizes
        return sizes.hidden_local + (sizes.hidden if sizes.is_on_cpu else 0)

    @property
    def _attention(self) -> AttentionMemory:
        return AttentionMemory(self.config.model, self.sizes)

    @property
    def _mlp(self) -> MlpMemory:
        return MlpMemory(self.config.model, self.sizes, self.is_selective)

    @property
    def _kept_inner(self) -> int:
        """What is kept of the mixers' input: all, this rank's rows, or nothing."""
        if self.is_selective:
            return 0
        return self.sizes.hidden_local if self.has_recipes else self.sizes.hidden

    @property
    def _inner_again(self) -> int:
        """What comes to life in backward because only its recipe was kept."""
        is_gathered = self.sizes.is_tp and self.has_recipes
        return self.sizes.hidden if is_gathered else self.sizes.hidden_local * self.is_selective


class ChunkedBranchMemory(BranchMemory):
    """A branch whose rows are exchanged in chunks: see megatrain/parallel/sequence_chunks.py."""

    @property
    def kept(self) -> int:
        has_copy = self.has_attention and not self.has_recipes
        return BranchMemory.kept.fget(self) + self.sizes.query * has_copy

    def _forward(self) -> int:
        sizes = self.sizes
        ledger = Ledger(norm_kept(self.config, sizes))
        ledger.hold(sizes.hidden_local)  # the norm's output
        ledger.hold(sizes.hidden, sizes.qkv * self.has_attention, sizes.up * self.has_mlp)
        ledger.release(sizes.hidden * self.has_recipes)
        if self.has_attention:
            ledger.hold(sizes.qkv)  # in the order of the sequence
            ledger.release(sizes.qkv)
            self._attention.attend(ledger)
            ledger.hold(sizes.query)  # in the order of the chunks
        if self.has_mlp:
            ledger.hold(sizes.activation)
        ledger.visit(self._pieces, sizes.hidden_local)
        ledger.hold(2 * sizes.hidden_local)
        return ledger.peak

    def _backward(self) -> Ledger:
        sizes = self.sizes
        ledger = Ledger(self.kept)
        ledger.hold(sizes.hidden_local)  # the gradient of the sum, which also goes past the branch
        own = sizes.hidden_local if self.config.model.dropout else 0
        copy = sizes.query * self.has_attention
        last_inputs = copy + sizes.activation * self.has_mlp
        normed = sizes.hidden_local * self.is_selective
        again = sizes.hidden * self.has_recipes
        ledger.hold(own, copy * self.has_recipes, sizes.activation * (self.has_mlp and self.is_selective), normed)
        ledger.hold(last_inputs)  # their gradients
        ledger.hold(sizes.hidden, again)
        ledger.release(sizes.hidden, own, last_inputs)
        if self.has_mlp:
            ledger.hold(sizes.up)
            ledger.release(sizes.up, sizes.activation)
        if self.has_attention:
            ledger.hold(sizes.query)  # in the order of the sequence
            ledger.release(sizes.query)
            self._attention.attend_backward(ledger)
            ledger.hold(sizes.qkv)  # in the order of the chunks
            ledger.release(sizes.qkv)
        ledger.visit(self._pieces, sizes.hidden_local)
        ledger.hold(sizes.hidden_local)
        ledger.release(again, self._kept_inner, normed, sizes.qkv * self.has_attention, sizes.up * self.has_mlp)
        ledger.visit(sizes.hidden_local)  # the gradient of the norm's input
        return ledger

    @property
    def _pieces(self) -> int:
        """Partial sums on their way, or made for it."""
        parallel = self.config.parallel
        return self.sizes.hidden if parallel.overlap else self.sizes.hidden // parallel.num_sequence_chunks


def norm_kept(config: Config, sizes: TensorBytes) -> int:
    """A norm keeps its input and its statistics."""
    return sizes.hidden_local + (2 if config.model.norm == "layernorm" else 1) * sizes.number_local
