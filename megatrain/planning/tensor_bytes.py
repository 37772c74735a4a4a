"""Bytes of the tensors that one micro-batch makes on one rank.

Shapes: S sequence, B micro-batch, H hidden, N query heads, G key-value heads, D head dim, F ffn, P parts of the widening
projection, V padded vocabulary. A rank holds 1 / tp_size of the heads, of F and of V, and outside of the mixers
1 / tp_size of the sequence (`_local`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.config import Config

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
TOKEN_BYTES = 8
"""Of a token id, a label, a token number."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Sizes in bytes; activations in the compute type, `_weight` a weight or its gradient in that type."""

    hidden: int
    hidden_local: int
    wide_local: int
    """[S / tp, B, H] in the type of sums: fp32, or fp64 for fp64."""
    query: int
    key: int
    """Of keys or of values."""
    qkv: int
    lse: int
    """One sum a token and head, kept by attention."""
    up: int
    """Before the activation function."""
    activation: int
    """After it."""
    logits: int
    mask: int
    """The additive mask [S, S] or [B, S, S] of one attention; 0 where causality is all."""
    token: int
    """One integer a token, whole sequence."""
    number: int
    """One number of the type of sums a token of the whole sequence."""
    is_wide: bool
    """Whether sums have a wider type than activations (bf16)."""
    qkv_weight: int
    out_weight: int
    up_weight: int
    down_weight: int
    word_weight: int
    position_weight: int
    sum_bytes: int
    """Of one number in the type of sums."""


def tensor_bytes(config: Config, tp_size: int) -> TensorBytes:
    """Return the sizes for a model spread over `tp_size` ranks."""
    model = config.model
    element = ELEMENT_BYTES[config.train.precision]
    sums = max(element, 4)
    rows = model.seq_len * config.batch.micro_batch_size
    head_dim, groups, hidden, ffn = (
        model.resolved_head_dim,
        model.resolved_num_kv_heads,
        model.hidden_size,
        model.resolved_ffn_size,
    )
    query, key = model.num_heads * head_dim // tp_size, groups * head_dim // tp_size
    parts = 2 if model.mlp == "swiglu" else 1
    num_masks = config.batch.micro_batch_size if config.data.has_document_mask else int(has_window(config))
    return TensorBytes(
        hidden=rows * hidden * element,
        hidden_local=rows // tp_size * hidden * element,
        wide_local=rows // tp_size * hidden * sums,
        query=rows * query * element,
        key=rows * key * element,
        qkv=rows * (query + 2 * key) * element,
        lse=rows * model.num_heads // tp_size * sums,
        up=rows * parts * ffn // tp_size * element,
        activation=rows * ffn // tp_size * element,
        logits=rows * model.padded_vocab_size // tp_size * element,
        mask=num_masks * model.seq_len**2 * element,
        token=rows * TOKEN_BYTES,
        number=rows * sums,
        is_wide=sums != element,
        qkv_weight=(query + 2 * key) * hidden * element,
        out_weight=query * hidden * element,
        up_weight=parts * ffn // tp_size * hidden * element,
        down_weight=ffn // tp_size * hidden * element,
        word_weight=model.padded_vocab_size // tp_size * hidden * element,
        position_weight=model.seq_len * hidden * element if model.positions == "learned" else 0,
        sum_bytes=sums,
    )


def has_window(config: Config) -> bool:
    """Whether a window hides pairs that causality allows."""
    return 0 < config.model.window_size < config.model.seq_len
