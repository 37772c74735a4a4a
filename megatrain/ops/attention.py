"""Causal self-attention: full or sliding window, with or without document boundaries, MHA or GQA.

Shapes: S sequence, B micro-batch, N query heads, G key-value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attention_mask(seq_len: int, window_size: int, document_SB: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which (query, key) pairs may meet, or None where plain causal attention says it all.

    window_size w > 0: a token sees itself and the w - 1 before it. document_SB: a token sees its own document only.
    Shapes: result [1 or B, 1, S, S] bool.
    """
    has_window = 0 < window_size < seq_len
    if not has_window and document_SB is None:
        return None
    position = torch.arange(seq_len, device=device)
    distance = position[:, None] - position[None, :]
    allowed = distance >= 0
    if has_window:
        allowed &= distance < window_size
    if document_SB is None:
        return allowed[None, None]
    document_BS = document_SB.t()
    return (allowed & (document_BS[:, :, None] == document_BS[:, None, :]))[:, None]


def causal_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the allowed pairs, fp32 softmax inside torch's kernel.

    Shapes: q [S, B, N, D]; k and v [S, B, G, D], N a multiple of G; result [S, B, N * D].
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    out_BNSD = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out_BNSD.permute(2, 0, 1, 3).flatten(2)
