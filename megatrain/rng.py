"""Counter-based random numbers: each value is a function of a key and an index only, not of call order or layout.

An initial weight is keyed by (seed, logical parameter name) and indexed by its flat position in the unsharded
parameter. A dropout draw is keyed by (seed, layer, site) and indexed by (sample, token, hidden unit). A rank computes
only the elements that it holds, so every layout gets bitwise the same numbers on one device type.

The mixing function is the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA'14; constants of Stafford's mix 13), in
wrapping int64 arithmetic; one 64-bit hash is drawn for each element.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit number, like every constant below
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LOW_32 = (1 << 32) - 1
_BLOCK = 1 << 20  # elements drawn at once: limits the int64 and fp64 temporaries to some tens of MB


def derive_key(*parts: object) -> tuple[int, int]:
    """Return two signed 64-bit keys, derived from all parts (SHA-256)."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:16], "little", signed=True),
    )


def _mix_(state: Tensor) -> Tensor:
    """Scramble int64 `state` in place. The masks turn torch's arithmetic shifts into logical ones."""
    state.bitwise_xor_((state >> 30) & ((1 << 34) - 1)).mul_(_MIX_1)
    state.bitwise_xor_((state >> 27) & ((1 << 37) - 1)).mul_(_MIX_2)
    return state.bitwise_xor_((state >> 31) & ((1 << 33) - 1))


def hash_indices(key: tuple[int, int], index: Tensor) -> Tensor:
    """Return a 64-bit hash of each int64 index. Both rounds use the key, so streams of two keys do not overlap."""
    state = _mix_((index + 1).mul_(_GOLDEN).add_(key[0]))
    return _mix_(state.bitwise_xor_(key[1]))


def box_indices(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the flat row-major positions, in a tensor of `shape`, of the axis-aligned box (offsets, sizes).

    Shapes: result [prod(sizes)], int64.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, length in enumerate(shape):
        along = torch.arange(offsets[dim], offsets[dim] + sizes[dim], dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * length + along
    return index.reshape(-1)


def fill_normal_(
    out: Tensor, key: tuple[int, int], std: float, global_shape: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Fill `out`, the box at `offsets` of a parameter of `global_shape`, with normal draws of deviation `std`.

    Box-Muller in fp64 (tail up to 6.7 deviations), rounded once to out's dtype.
    Shapes: out is contiguous, one dim for each of global_shape.
    """
    flat = out.view(-1)
    row = math.prod(out.shape[1:]) if out.dim() > 1 else 1
    if row > _BLOCK:  # one slice is already too large: fill it as rows of a tensor with the first two dims merged
        merged_shape = (global_shape[0] * global_shape[1], *global_shape[2:])
        for position in range(out.shape[0]):
            first = (offsets[0] + position) * global_shape[1] + offsets[1]
            fill_normal_(out[position], key, std, merged_shape, (first, *offsets[2:]))
        return out
    rows_at_once = max(1, _BLOCK // max(1, row))
    for first in range(0, out.shape[0], rows_at_once):
        count = min(rows_at_once, out.shape[0] - first)
        index = box_indices(global_shape, (offsets[0] + first, *offsets[1:]), (count, *out.shape[1:]), out.device)
        bits = hash_indices(key, index)
        radius = (((bits >> 32) & _LOW_32).double().add_(0.5).mul_(2.0**-32)).log_().mul_(-2.0).sqrt_()
        angle = (bits & _LOW_32).double().mul_(2.0 * math.pi * 2.0**-32).cos_()
        flat[first * row : (first + count) * row].copy_(radius.mul_(angle).mul_(std))
    return out


def keep_mask(key: tuple[int, int], probability: float, token_SB: Tensor, hidden_size: int) -> Tensor:
    """Return which elements survive dropout: a pure function of key, global token number and hidden unit.

    Shapes: token_SB [S, B] int64, the global number of each token; result [S, B, H] bool.
    """
    token_hash = hash_indices(key, token_SB).unsqueeze(-1)
    unit = torch.arange(1, hidden_size + 1, dtype=torch.int64, device=token_SB.device).mul_(_GOLDEN)
    bits = _mix_(token_hash + unit)
    return ((bits >> 32) & _LOW_32) >= round(probability * 2.0**32)
