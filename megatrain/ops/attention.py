"""Self-attention: causal, full or sliding window, with or without document boundaries, MHA or GQA; or bidirectional.

Shapes: S sequence, B micro-batch, N query heads, G key-value heads, D head dim.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.ops.attention_choice import (
    AttentionCase,
    AttentionChoice,
    Backend,
    DeviceKind,
    choose_attention,
    kind_of,
)
from megatrain.ops.attention_segments import AttentionSegment, segments_of
from megatrain.ops.capped_attention import CappedScores, capped_attention
from megatrain.ops.documents import PackedDocuments
from megatrain.ops.segment_attention import segment_attention

_logger = logging.getLogger(__name__)
_KERNELS = {
    Backend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Backend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(slots=True)
class AttentionPattern:
    """Which positions attend to which in one micro-batch.

    All layers of one kind use the same pattern, so its mask and its kernel are determined only once.
    window_size w > 0: a token attends to itself and the w - 1 tokens before it. documents: a token attends only to its
    own document.
    backend: "auto", or the name of the only backend that may be used. is_strict: whether a slow path is an error.
    device_kind: the kind of device that kernels are chosen for; None: the device of the heads. It must be set if the
    heads are on meta.
    scale: the factor of the scores; None: 1 / sqrt(D). softcap c > 0: a score s becomes c * tanh(s / c).
    is_causal: False means that every position attends to all positions; then there are no window, documents and cap.
    """

    seq_len: int
    window_size: int = 0
    documents: PackedDocuments | None = None
    backend: str = "auto"
    is_strict: bool = False
    device_kind: DeviceKind | None = None
    scale: float | None = None
    softcap: float = 0.0
    is_causal: bool = True
    _mask: Tensor | None = field(default=None, init=False)
    _segments: tuple[AttentionSegment, ...] | None = field(default=None, init=False)
    _choice: AttentionChoice | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.is_causal or not (self.window_size or self.documents or self.softcap), "not causal, with a mask"

    @property
    def has_window(self) -> bool:
        return 0 < self.window_size < self.seq_len

    @property
    def is_plain(self) -> bool:
        """Whether a token attends to all tokens before it, or to all tokens: no mask is needed."""
        return not self.has_window and self.documents is None

    def choice(self, q_SBND: Tensor, k_SBGD: Tensor) -> AttentionChoice:
        """Return the kernel for these heads, chosen at the first call: all layers have heads of one dtype and shape.

        Raises: ConfigError under the conditions of choose_attention.
        """
        if self._choice is None:
            kind = self.kind(q_SBND.device)
            case = AttentionCase(
                kind.type,
                kind.capability,
                q_SBND.dtype,
                q_SBND.shape[-1],
                self.has_window,
                self.documents is not None,
                _refused_by_torch(q_SBND, k_SBGD),
                self.softcap > 0,
            )
            self._choice = _checked_choice(case, self.backend, self.is_strict)
        return self._choice

    def kind(self, device: torch.device) -> DeviceKind:
        """Return the kind of device that kernels are chosen for, given that the heads are on `device`."""
        return self.device_kind or kind_of(device)

    def segments(self, dtype: torch.dtype, device: torch.device) -> tuple[AttentionSegment, ...]:
        """Return the segments for attention on the CPU, with masks of `dtype`; on meta, as if each sample were one
        document."""
        if self._segments is None:
            documents = None if device.type == "meta" else self.documents
            self._segments = segments_of(self.seq_len, self.window_size, documents, dtype, device)
        return self._segments

    def mask(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the number to add to the score of each (query, key): 0 or -inf.

        dtype: the dtype of the queries, because torch's kernels would convert a mask of another dtype in every layer.
        Shapes: result [1 or B, 1, S, S].
        """
        if self._mask is None:
            position = torch.arange(self.seq_len, device=device)
            query, key = position[:, None], position[None, :]
            allowed = query >= key
            if self.has_window:
                allowed &= query < key + self.window_size
            allowed = allowed[None]
            if self.documents is not None:
                number_BS = self.documents.number_SB.t()
                allowed = allowed & (number_BS[:, :, None] == number_BS[:, None, :])
            mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
            self._mask = mask.masked_fill_(allowed.logical_not_(), float("-inf"))[:, None]
        return self._mask


def softmax_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, pattern: AttentionPattern) -> Tensor:
    """Return softmax(scale * q k') v over the keys that `pattern` allows. torch's kernels compute softmax in fp32.

    Shapes: q [S, B, N, D]; k and v [S, B, G, D], N a multiple of G; result [S, B, N * D].
    """
    choice = pattern.choice(q_SBND, k_SBGD)
    if choice.backend is Backend.FLASH:
        return _flash_attention(q_SBND, k_SBGD, v_SBGD, pattern).flatten(2)
    if choice.backend is Backend.BLOCKS:
        scale = pattern.scale or q_SBND.shape[-1] ** -0.5
        window_size = pattern.window_size if pattern.has_window else 0
        scores = CappedScores(scale, pattern.softcap, window_size, pattern.documents)
        return capped_attention(q_SBND, k_SBGD, v_SBGD, scores).flatten(2)
    if choice.backend is Backend.CPU and not pattern.is_plain:
        segments = pattern.segments(q_SBND.dtype, q_SBND.device)
        return segment_attention(q_SBND, k_SBGD, v_SBGD, segments, pattern.scale).flatten(2)
    scale = pattern.scale
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    mask = None if pattern.is_plain else pattern.mask(q.device, q.dtype)
    is_causal = pattern.is_causal and mask is None
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and choice.backend in (Backend.EFFICIENT, Backend.DENSE) and pattern.kind(q.device).type == "cuda":
        # on CUDA these kernels support no grouped heads; torch would use one that writes out all S * S scores
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        is_grouped = False
    if q.is_meta:
        out_BNSD = _attention_on_meta(choice.backend, q, k, v, mask, is_causal=is_causal, scale=scale)
    elif choice.backend in _KERNELS:
        with sdpa_kernel(_KERNELS[choice.backend]):
            out_BNSD = functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
            )
    else:
        out_BNSD = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )
    return out_BNSD.permute(2, 0, 1, 3).flatten(2)


def _attention_on_meta(
    backend: Backend,
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Run attention on meta with the operator that torch uses on the device of `backend`, which saves the same tensors.

    On meta, scaled_dot_product_attention() would choose an operator that writes out all scores.
    """
    aten = torch.ops.aten
    if backend is Backend.CPU:
        return aten._scaled_dot_product_flash_attention_for_cpu(q_BNSD, k_BGSD, v_BGSD, 0.0, is_causal, scale=scale)[0]
    if backend is Backend.CUDNN:
        return aten._scaled_dot_product_cudnn_attention(
            q_BNSD, k_BGSD, v_BGSD, None, True, 0.0, is_causal, scale=scale
        )[0]
    if q_BNSD.dtype == torch.float64:
        return functional.scaled_dot_product_attention(q_BNSD, k_BGSD, v_BGSD, mask, is_causal=is_causal, scale=scale)
    if mask is not None:
        mask = mask.expand(*q_BNSD.shape[:2], *mask.shape[2:])
    return aten._scaled_dot_product_efficient_attention(
        q_BNSD, k_BGSD, v_BGSD, mask, True, 0.0, is_causal, scale=scale
    )[0]


def _flash_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, pattern: AttentionPattern) -> Tensor:
    """Run flash attention through torch's internal operators.

    Some versions of torch have no public interface for windows and documents. The inputs may have any strides except in
    D. So with documents, each sample is a separate call, and nothing is copied.
    """
    options: dict[str, Any] = {"scale": pattern.scale}
    if pattern.has_window:
        options |= {"window_size_left": pattern.window_size - 1, "window_size_right": 0}
    if pattern.documents is None:
        length = pattern.seq_len
        q, k, v = (x.transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD))
        out_BSND = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, length, length, 0.0, pattern.is_causal, False, **options
        )[0]
        return out_BSND.transpose(0, 1)
    outs = []
    for sample, (starts, longest) in enumerate(zip(pattern.documents.starts, pattern.documents.longest, strict=True)):
        q, k, v = (x[:, sample] for x in (q_SBND, k_SBGD, v_SBGD))
        outs.append(
            torch.ops.aten._flash_attention_forward(
                q, k, v, starts, starts, longest, longest, 0.0, True, False, **options
            )[0]
        )
    return outs[0].unsqueeze(1) if len(outs) == 1 else torch.stack(outs, 1)


@cache
def _checked_choice(case: AttentionCase, wanted: str, is_strict: bool) -> AttentionChoice:
    """Choose a backend and log the choice, once per process for each case."""
    choice = choose_attention(case, wanted, is_strict=is_strict)
    _logger.log(
        logging.WARNING if choice.is_fallback else logging.INFO,
        "attention: %s%s",
        choice.backend,
        f" ({choice.reason})" if choice.reason and case.device_type == "cuda" else "",
    )
    return choice


def _refused_by_torch(q_SBND: Tensor, k_SBGD: Tensor) -> frozenset[Backend]:
    if q_SBND.device.type != "cuda":
        return frozenset()
    q, k = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD))
    parameters = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, q.shape[1] != k.shape[1])
    can_use = torch.backends.cuda.can_use_cudnn_attention(parameters)
    return frozenset() if can_use else frozenset({Backend.CUDNN})
