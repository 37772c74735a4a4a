"""Causal self-attention: full or sliding window, with or without document boundaries, MHA or GQA.

Shapes: S sequence, B micro-batch, N query heads, G key-value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attention_mask(
    seq_len: int, window_size: int, document_SB: Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Return what to add to the scores of each (query, key): 0 or -inf; None where plain causal attention says it all.

    window_size w > 0: a token sees itself and the w - 1 before it. document_SB: a token sees its own document only. In
    the type of the queries, because torch's kernels would turn any other into that, in every layer anew.
    Shapes: result [1 or B, 1, S, S].
    """
    has_window = 0 < window_size < seq_len
    if not has_window and document_SB is None:
        return None
    position = torch.arange(seq_len, device=device)
    query, key = position[:, None], position[None, :]
    allowed = query >= key
    if has_window:
        allowed &= query < key + window_size
    allowed = allowed[None]
    if document_SB is not None:
        document_BS = document_SB.t()
        allowed = allowed & (document_BS[:, :, None] == document_BS[:, None, :])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(allowed.logical_not_(), float("-inf"))[:, None]


def causal_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(q k' / sqrt(D) + mask) v, fp32 softmax inside torch's kernel; without a mask, causal.

    Shapes: q [S, B, N, D]; k and v [S, B, G, D], N a multiple of G; result [S, B, N * D].
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and mask is not None and q.device.type == "cuda":
        # on CUDA no kernel takes grouped heads together with a mask: torch would write out all S * S scores
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        is_grouped = False
    out_BNSD = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )
    return out_BNSD.permute(2, 0, 1, 3).flatten(2)
