"""The counter-based generator is random enough: uniform bits, normal weights, streams without correlation.

Seeds are fixed, so nothing here can fail by chance; bounds are at least 4 standard errors of a true random source.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatrain.rng import derive_key, fill_normal_, hash_indices, keep_mask

NUM = 1 << 18
CPU = torch.device("cpu")
KEYS = [derive_key("weights", 1234, name) for name in ("embedding.word.weight", "blocks.0.mlp.up.weight", "a")]


def hashes(key: tuple[int, int], first: int = 0, num: int = NUM) -> Tensor:
    return hash_indices(key, torch.arange(first, first + num))


def normals(name: str, seed: int = 1) -> Tensor:
    out = torch.empty(NUM, dtype=torch.float64)
    return fill_normal_(out, derive_key("weights", seed, name), 1.0, (NUM,), (0,))


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def test_numbers_are_those_of_earlier_versions() -> None:
    """Another number would change the dropout of a run that resumes, and the weights of a seed."""
    key = KEYS[0]
    assert key == (-262873377373217033, 5174984049623498604)
    drawn = hash_indices(key, torch.tensor([0, 1, 2**40]))
    assert drawn.tolist() == [5361068068584470258, -5395516093717290412, 4702870326082594317]
    box = fill_normal_(torch.empty(2, 2, dtype=torch.float64), key, 0.02, (4, 4), (1, 2))
    expected = [[-0.007317451701229264, 0.0015369360685646785], [-0.03229997407330369, 0.006207941634428955]]
    torch.testing.assert_close(box, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)
    mask = keep_mask(derive_key("dropout", 1, 2, "site"), 0.5, torch.tensor([[0], [7]]), 8)
    assert mask.flatten(1).int().tolist() == [[1, 1, 0, 0, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1, 0, 0]]


@pytest.mark.slow(kept=["key0"])
@pytest.mark.parametrize("key", KEYS)
def test_every_bit_is_set_half_of_the_time(key: tuple[int, int]) -> None:
    bits = (hashes(key)[:, None] >> torch.arange(64)) & 1

    # standard error of a fraction of NUM fair draws: 0.5 / sqrt(NUM) = 0.001
    assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(NUM)


def test_bits_of_one_hash_are_not_correlated() -> None:
    num = NUM // 4
    bits = ((hashes(KEYS[0], num=num)[:, None] >> torch.arange(64)) & 1).double()
    correlations = torch.corrcoef(bits.t()) - torch.eye(64, dtype=torch.float64)
    assert correlations.abs().max() < 6 / math.sqrt(num)


def test_bytes_are_uniform() -> None:
    drawn = hashes(KEYS[0])
    for shift in (0, 8, 32, 56):
        counts = torch.bincount(((drawn >> shift) & 255), minlength=256).double()
        chi_square = ((counts - NUM / 256).square() / (NUM / 256)).sum().item()
        # 255 degrees of freedom: mean 255, standard deviation sqrt(510) = 22.6
        assert abs(chi_square - 255) < 4 * math.sqrt(510), f"bits from {shift} on"


def test_flipped_index_bit_flips_half_of_the_hash() -> None:
    index = torch.arange(4096) * 977
    base = hash_indices(KEYS[0], index)
    for bit in range(40):
        changed = base ^ hash_indices(KEYS[0], index ^ (1 << bit))
        flipped = ((changed[:, None] >> torch.arange(64)) & 1).double().sum(1).mean().item()
        # 32 of 64 with standard deviation 4 each: the mean of 4096 has 0.0625
        assert abs(flipped - 32) < 0.35, f"index bit {bit}"


def test_keys_depend_on_every_part_and_its_place() -> None:
    parts = [("a", 1), ("a", 2), ("b", 1), (1, "a"), ("a1",), ("a",), ("weights", 1234, "x"), ("dropout", 1234, "x")]
    keys = [derive_key(*part) for part in parts]

    assert len(set(keys)) == len(keys)
    assert all(-(1 << 63) <= half < 1 << 63 for key in keys for half in key)
    assert derive_key("weights", 1, "x") == derive_key("weights", 1, "x")


def test_both_halves_of_a_key_matter() -> None:
    first, second = KEYS[0]
    base = hashes((first, second), num=1000)

    assert not (base == hashes((first + 1, second), num=1000)).any()
    assert not (base == hashes((first, second + 1), num=1000)).any()


def test_normal_draws_have_the_moments_of_a_normal() -> None:
    x = normals("a")

    error = 1 / math.sqrt(NUM)
    assert abs(x.mean().item()) < 4 * error
    assert abs(x.var().item() - 1) < 4 * math.sqrt(2) * error
    assert abs(x.pow(3).mean().item()) < 4 * math.sqrt(15) * error
    assert abs(x.pow(4).mean().item() - 3) < 4 * math.sqrt(96) * error


def test_normal_draws_have_the_distribution_of_a_normal() -> None:
    x = normals("blocks.1.attention.out.weight").sort().values

    expected = torch.special.ndtr(x)
    found = torch.arange(1, NUM + 1, dtype=torch.float64) / NUM
    # Kolmogorov-Smirnov: P(sqrt(n) D > 1.95) = 0.001
    assert (expected - found).abs().max().item() < 1.95 / math.sqrt(NUM)
    assert 4 < x.abs().max().item() < 6.8


def test_normal_draws_have_the_asked_deviation() -> None:
    out = torch.empty(512, 512, dtype=torch.float64)
    fill_normal_(out, KEYS[1], 0.02, (512, 512), (0, 0))

    assert abs(out.std().item() / 0.02 - 1) < 4 / math.sqrt(2 * out.numel())


def test_neighbors_are_not_correlated() -> None:
    x = normals("a")
    for lag in (1, 2, 3, 16, 64, 768, 1024, 4096):
        error = 1 / math.sqrt(NUM - lag)
        assert abs(correlation(x[:-lag], x[lag:])) < 4 * error, lag
        assert abs(correlation(x[:-lag].square(), x[lag:].square())) < 4 * error, lag


def test_parameters_and_seeds_are_not_correlated() -> None:
    names = ["embedding.word.weight", "embedding.position", "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"]
    streams = [normals(name) for name in names] + [normals(names[0], seed=2), normals(names[0], seed=1 << 40)]

    for first, second in itertools.combinations(streams, 2):
        for lag in (0, 1, 7):
            assert abs(correlation(first[: NUM - lag], second[lag:])) < 4.5 / math.sqrt(NUM)


def test_hashes_of_all_indices_and_keys_are_different() -> None:
    values = torch.cat([*(hashes(key) for key in KEYS), hashes(KEYS[0], first=1 << 45, num=1000)])

    assert len(values.unique()) == len(values), "no stream is another one shifted"
