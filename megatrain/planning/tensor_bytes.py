"""Bytes of the tensors that one micro-batch makes on one rank.

Shapes: S sequence, B micro-batch, H hidden. A rank holds 1 / tp_size of the heads, of the MLP's width and of the
vocabulary, and outside of the mixers 1 / tp_size of the sequence (`_local`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.ops.attention_choice import Backend, attention_case, choose_attention

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
TOKEN_BYTES = 8
"""Of a token id, a label, a token number."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Sizes in bytes; activations are in the compute type."""

    element: int
    """One number of the compute type."""
    sum_element: int
    """One number of the type of sums and statistics: fp32, or fp64 for fp64."""
    is_tp: bool
    is_on_cpu: bool
    is_split: bool
    """Whether products that give weights' gradients are put off."""
    fp8_product_element: int
    """One number of a weight's gradient as a product in FP8 gives it, before it is added to the sum; 0 without FP8."""
    rows: int
    """Tokens of a micro-batch."""
    hidden: int
    hidden_local: int
    query: int
    """Of all query heads, and of attention's output."""
    key: int
    """Of all keys, and of all values."""
    qkv: int
    is_query_copied: bool
    """Whether a key and a value lie between the queries of two groups: then heads in a row are a copy of them."""
    lse: int
    """One sum a token and head."""
    mask: int
    """The additive mask [S, S], or [B, S, S] for documents, which every attention keeps; 0 where causality is all."""
    up: int
    """Before the activation function."""
    activation: int
    """After it."""
    logits: int
    token: int
    """One integer a token."""
    token_local: int
    number_local: int
    """One number of the type of sums a token."""
    position_gradient: int

    @property
    def is_fp8(self) -> bool:
        return self.fp8_product_element > 0

    def fp8_forward(self, inputs: int, outputs: int) -> int:
        """Return what a product in FP8 needs while it runs: its input and its weight in 8 bits.

        inputs and outputs: bytes of what goes in and comes out of a layer's projection.
        """
        return (self._elements(inputs) + self._weight_elements(inputs, outputs)) * self.is_fp8

    def fp8_backward(self, inputs: int, outputs: int) -> int:
        """Return the same of backward: the output's gradient in both forms, the transposed weight, its gradient."""
        weight = self._weight_elements(inputs, outputs)
        product = 0 if self.is_split else weight * self.fp8_product_element
        return (2 * self._elements(outputs) + weight) * self.is_fp8 + product

    def fp8_put_off(self, outputs: int) -> int:
        """Return what stays of the output's gradient, in 8 bits, for a product that is put off."""
        return self._elements(outputs) * (self.is_fp8 and self.is_split)

    def _elements(self, size: int) -> int:
        return size // self.element

    def _weight_elements(self, inputs: int, outputs: int) -> int:
        return self._elements(inputs) // self.rows * (self._elements(outputs) // self.rows)

    @property
    def is_mixed(self) -> bool:
        """Whether sums have another type than activations."""
        return self.sum_element != self.element


def tensor_bytes(config: Config, tp_size: int) -> TensorBytes:
    """Return the sizes for a model spread over `tp_size` ranks."""
    model = config.model
    element = ELEMENT_BYTES[config.train.precision]
    sum_element = max(element, 4)
    rows = model.seq_len * config.batch.micro_batch_size
    rows_local = rows // tp_size
    hidden = model.hidden_size
    query = model.num_heads * model.resolved_head_dim // tp_size
    key = model.resolved_num_kv_heads * model.resolved_head_dim // tp_size
    ffn = model.resolved_ffn_size // tp_size
    up = 2 * ffn if model.mlp == "swiglu" else ffn
    vocab = model.padded_vocab_size // tp_size
    return TensorBytes(
        element=element,
        sum_element=sum_element,
        is_tp=tp_size > 1,
        is_on_cpu=config.runtime.device == "cpu",
        is_split=config.parallel.splits_backward,
        fp8_product_element={"none": 0, "tensorwise": sum_element, "rowwise": element}[config.fp8.recipe],
        rows=rows,
        hidden=rows * hidden * element,
        hidden_local=rows_local * hidden * element,
        query=rows * query * element,
        key=rows * key * element,
        qkv=rows * (query + 2 * key) * element,
        is_query_copied=model.num_heads > model.resolved_num_kv_heads > tp_size,
        lse=rows * (model.num_heads // tp_size) * sum_element,
        mask=_num_masks(config) * model.seq_len**2 * element,
        up=rows * up * element,
        activation=rows * ffn * element,
        logits=rows * vocab * element,
        token=rows * TOKEN_BYTES,
        token_local=rows_local * TOKEN_BYTES,
        number_local=rows_local * sum_element,
        position_gradient=model.seq_len * hidden * element if model.positions == "learned" else 0,
    )


def _num_masks(config: Config) -> int:
    """Return how many masks of [S, S] attention needs: none where a kernel knows windows and documents."""
    # on a GPU that is not known here: its kernels are the same from Ampere on
    on_gpu = ("cuda", (9, 0))
    case = attention_case(config, *(("cpu", (0, 0)) if config.runtime.device == "cpu" else on_gpu))
    if choose_attention(case, config.kernels.attention).backend not in (Backend.CPU, Backend.DENSE):
        return 0
    if config.data.has_document_mask:
        return config.batch.micro_batch_size
    return int(0 < config.model.window_size < config.model.seq_len)
