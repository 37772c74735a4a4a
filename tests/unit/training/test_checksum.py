"""Checksums: equal for equal bytes, different after any changed bit, and independent of how the sum is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.training.replica_check import PIECE_WORDS, Checksums

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


def flip(x: torch.Tensor, bit: int) -> torch.Tensor:
    """Return a copy of `x` with one bit of its memory flipped, by its number."""
    raw = x.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(x.dtype)


@pytest.fixture(scope="module")
def checksums() -> Checksums:
    return Checksums(torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype, checksums: Checksums) -> None:
    x = torch.randn(24, generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers = [int(checksums.of(flip(x, bit))) for bit in range(x.numel() * x.element_size() * 8)]

    assert int(checksums.of(x)) not in numbers
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_two_changed_signs_do_not_cancel(dtype: torch.dtype, checksums: Checksums) -> None:
    x = torch.randn(32, generator=torch.Generator().manual_seed(2)).to(dtype)
    numbers = {int(checksums.of(x))}
    for first in range(32):
        for second in range(first):
            y = x.clone()
            y[[first, second]] *= -1
            numbers.add(int(checksums.of(y)))

    assert len(numbers) == 1 + 32 * 31 // 2


def test_order_matters_across_pieces_too(checksums: Checksums) -> None:
    x = torch.zeros(2 * PIECE_WORDS + 3)
    x[0], x[PIECE_WORDS], x[-1] = 1.0, 2.0, 3.0
    swapped = x.clone()
    swapped[0], swapped[PIECE_WORDS] = 2.0, 1.0
    moved = x.roll(PIECE_WORDS)

    assert len({int(checksums.of(one)) for one in (x, swapped, moved, x[:-1], x[:PIECE_WORDS])}) == 5


def test_checksum_compares_bits_not_numbers(checksums: Checksums) -> None:
    nan = torch.tensor([1.0, float("nan")])

    assert int(checksums.of(nan)) == int(checksums.of(nan.clone()))
    assert int(checksums.of(torch.tensor([0.0]))) != int(checksums.of(torch.tensor([-0.0])))


def test_checksum_equals_its_definition(checksums: Checksums) -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (PIECE_WORDS + 5,), generator=torch.Generator().manual_seed(3))
    drawn = torch.randint(
        -(2**63), 2**63 - 1, (PIECE_WORDS,), generator=torch.Generator().manual_seed(0), dtype=torch.int64
    )
    factors, words = (one.numpy().astype(np.uint64) for one in (drawn | 1, x))
    first = int((words[:PIECE_WORDS] * factors).sum())
    second = int((words[PIECE_WORDS:] * factors[:5]).sum())

    expected = (first * 0x9E3779B97F4A7C15 + second) % 2**64
    assert int(checksums.of(x.to(torch.int32).view(torch.float32))) % 2**64 == expected
