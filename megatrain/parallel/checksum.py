"""A number that tells whether two ranks hold the same bytes, without sending them.

Words of the memory are multiplied by odd numbers that look random, one for each place in a piece, and summed modulo
2^64; the sums of pieces become digits of one number. A single changed word always gives another number, as an odd
factor takes no bit away, and so does nearly every other change, one of places included. Integers add up to the same in
any order: so the number does not depend on the device. Ours, after multilinear hashing (Carter and Wegman, 1979).
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_WORDS = 2**20
"""Their products take 8 MiB while they are summed, however large the memory is."""
_BASE = 0x9E3779B97F4A7C15 - 2**64
"""Odd, so that no digit is lost; 2^64 divided by the golden ratio."""


class Checksums:
    """Makes checksums of memory on one device."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same factors on every rank
        factors = torch.randint(-(2**63), 2**63 - 1, (PIECE_WORDS,), generator=generator, dtype=torch.int64)
        self._factors = (factors | 1).to(device)

    def of(self, x: Tensor) -> Tensor:
        """Return the checksum of the bits of flat, contiguous `x`, on its device.

        Shapes: x [n]; result [], int64.
        """
        # sign bits of 64-bit words would cancel out in pairs
        words = x.detach().view({1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32))
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for piece in words.split(PIECE_WORDS):
            total = total * _BASE + (piece * self._factors[: piece.numel()]).sum()
        return total
