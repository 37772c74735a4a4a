"""Choosing tokens: greedy, temperature, top-k and top-p compared with their definitions."""

from __future__ import annotations

import torch

from megatrain.inference.generation import Sampling, choose_token

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64))


TOLERANCE = 0.04
"""The tolerance of the fraction of 1500 draws: more than three standard deviations."""


def drawn(sampling: Sampling, count: int = 1500) -> torch.Tensor:
    """Return how often each token was drawn, as a fraction."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.tensor([choose_token(LOGITS, sampling, generator) for _ in range(count)])
    return torch.bincount(tokens, minlength=4) / count


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(Sampling(temperature=0.0), 10).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    assert torch.allclose(drawn(Sampling(temperature=1.0)), LOGITS.exp().float(), atol=TOLERANCE)


def test_low_temperature_sharpens() -> None:
    expected = torch.tensor([0.01, 0.16, 0.04, 0.09]) / 0.3
    assert torch.allclose(drawn(Sampling(temperature=0.5)), expected, atol=TOLERANCE)


def test_top_k_keeps_the_k_likeliest() -> None:
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])
    assert torch.allclose(drawn(Sampling(temperature=1.0, top_k=2)), expected, atol=TOLERANCE)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    fractions = drawn(Sampling(temperature=1.0, top_p=0.65))  # 0.4 + 0.3 reach it
    assert torch.allclose(fractions, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]), atol=TOLERANCE)
    assert drawn(Sampling(temperature=1.0, top_p=0.05), 20).tolist() == [0, 1, 0, 0]


def test_top_p_needs_no_token_past_a_set_that_reaches_it_exactly() -> None:
    uniform = torch.zeros(4)  # probabilities of exactly a quarter
    generator = torch.Generator().manual_seed(3)
    assert len({choose_token(uniform, Sampling(top_p=0.5), generator) for _ in range(100)}) == 2


def test_top_k_above_the_vocabulary_cuts_nothing() -> None:
    assert torch.equal(drawn(Sampling(top_k=10), 200), drawn(Sampling(), 200))


def test_choosing_a_token_does_not_change_the_logits() -> None:
    before = LOGITS.clone()
    choose_token(LOGITS, Sampling(top_k=1, top_p=0.5), torch.Generator())
    assert torch.equal(LOGITS, before)
