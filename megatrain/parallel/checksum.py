"""A checksum that shows whether two ranks hold the same bytes, without sending them.

The words of a piece of memory are multiplied by odd pseudo-random numbers, one for each position, and summed modulo
2^64. The sums of the pieces are combined as the digits of one number. A single changed word always changes the
checksum, because multiplying by an odd factor loses no bits. Nearly every other change does too, including swapped
words. A sum of integers does not depend on the order, so the checksum does not depend on the device.
Source: ours, after multilinear hashing (Carter and Wegman, 1979).
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_WORDS = 2**20
"""The products of one piece take 8 MiB while they are summed, however large the memory is."""
_BASE = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio. It is odd, so that no digit is lost."""


class Checksums:
    """Computes checksums of memory on one device."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same factors on every rank
        factors = torch.randint(-(2**63), 2**63 - 1, (PIECE_WORDS,), generator=generator, dtype=torch.int64)
        self._factors = (factors | 1).to(device)

    def of(self, x: Tensor) -> Tensor:
        """Return the checksum of the bits of flat, contiguous `x`, on its device.

        Shapes: x [n]; result [], int64.
        """
        # words of 32 bits at most: changes of the sign bits of two 64-bit words would cancel out
        words = x.detach().view({1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32))
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for piece in words.split(PIECE_WORDS):
            total = total * _BASE + (piece * self._factors[: piece.numel()]).sum()
        return total
