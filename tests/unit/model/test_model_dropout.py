"""Dropout in the model: its places, and that its masks belong to samples and tokens, not to calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.model import TokenContext, Transformer
from megatrain.model.dropout import ResidualDropout
from tests.helpers.drawn_parameters import draw_parameters

S, B = 8, 4


def build(seed: int = 1, **changes: Any) -> Transformer:
    sizes: dict[str, Any] = {
        "vocab_size": 40, "seq_len": S, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "vocab_multiple": 1,
        "dropout": 0.2,
    }  # fmt: skip
    model = Transformer(ModelConfig(**(sizes | changes)), dropout_seed=seed).double()
    draw_parameters(model)
    return model


TOKENS = torch.randint(0, 40, (S, B), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def hidden(model: Transformer, samples: list[int], tokens: Tensor = TOKENS) -> Tensor:
    return model.hidden(tokens, TokenContext(torch.tensor(samples), S))


def test_evaluation_has_no_dropout() -> None:
    assert torch.equal(hidden(build().eval(), [0, 1, 2, 3]), hidden(build(dropout=0.0), [0, 1, 2, 3]))


def test_training_has_dropout() -> None:
    assert not torch.allclose(hidden(build().train(), [0, 1, 2, 3]), hidden(build().eval(), [0, 1, 2, 3]))


def test_same_samples_have_the_same_masks() -> None:
    model = build()
    torch.manual_seed(0)
    first = hidden(model, [3, 9, 10, 11])
    torch.manual_seed(1)

    assert torch.equal(first, hidden(model, [3, 9, 10, 11]))
    assert torch.equal(first, hidden(build(), [3, 9, 10, 11]))


def test_other_samples_and_seeds_have_other_masks() -> None:
    tokens = TOKENS[:, :1].expand(S, B)
    out = hidden(build(), [0, 1, 2, 1 << 40], tokens)
    for first in range(B):
        for second in range(first):
            assert not torch.allclose(out[:, first], out[:, second])
    assert not torch.allclose(out, hidden(build(seed=2), [0, 1, 2, 1 << 40], tokens))


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_mask_of_a_sample_does_not_depend_on_its_neighbors(block: str) -> None:
    model = build(block=block)
    together = hidden(model, [5, 6, 7, 8])

    for sample in range(B):
        alone = hidden(model, [5 + sample], TOKENS[:, sample : sample + 1])
        torch.testing.assert_close(alone, together[:, sample : sample + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("block", "num_sites"), [("serial", 7), ("parallel", 4)])
def test_every_site_has_a_key_of_its_own(block: str, num_sites: int) -> None:
    sites = [module for module in build(block=block).modules() if isinstance(module, ResidualDropout)]

    assert len(sites) == num_sites
    assert len({site.key for site in sites}) == num_sites
    assert all(site.probability == 0.2 for site in sites)


def test_residual_stream_itself_is_never_dropped() -> None:
    """With branches whose output is zero, the last hidden states are the embedding's, dropped once."""
    model = build()
    assert model.embedding is not None
    with torch.no_grad():
        for name, parameter in model.blocks.named_parameters():
            if name.endswith(("out.weight", "down.weight", "_bias")):
                parameter.zero_()
        context = TokenContext(torch.arange(B), S)
        embedded = model.embedding(TOKENS, context)

    assert 0.1 < (embedded == 0).double().mean().item() < 0.3
    assert torch.equal(hidden(model, [0, 1, 2, 3]), embedded)


def test_rows_of_a_sharded_sequence_get_their_own_masks() -> None:
    dropout = ResidualDropout(0.3, 1, "site")
    x = torch.ones(S, B, 16, dtype=torch.float64)
    samples = torch.tensor([4, 2, 9, 0])
    whole = dropout(x, TokenContext(samples, S))
    halves = [dropout(x[:4], TokenContext(samples, S, token_offset=offset)) for offset in (0, 4)]

    assert torch.equal(torch.cat(halves), whole)


def test_token_numbers_are_unique_in_the_stream() -> None:
    numbers = [TokenContext(torch.arange(first, first + 2), S).token_numbers(S) for first in (0, 2, 4)]

    assert sorted(torch.cat(numbers, 1).flatten().tolist()) == list(range(6 * S))
