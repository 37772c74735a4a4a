"""The tokens that a hidden state depends on: causal, sliding window, documents, and never another sample.

The dependence is measured, not read from a mask: one token is changed and the hidden states that change are noted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.model import TokenContext, Transformer
from megatrain.ops.documents import pack_documents
from tests.helpers.drawn_parameters import draw_parameters

S, B = 9, 2
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2], [7, 3, 3, 3, 3, 3, 3, 3, 4]]).t()


def build(**changes: Any) -> Transformer:
    sizes: dict[str, Any] = {
        "vocab_size": 50, "seq_len": S, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_multiple": 1,
    }  # fmt: skip
    model = Transformer(ModelConfig(**(sizes | changes))).double()
    draw_parameters(model)
    return model


@torch.no_grad()
def reach(model: Transformer, document_SB: Tensor | None) -> Tensor:
    """Return [S, S, B]: whether hidden state `query` depends on token `key` of the same sample."""
    context = TokenContext(torch.arange(B), S, None if document_SB is None else pack_documents(document_SB))
    tokens = torch.randint(0, 50, (S, B), generator=torch.Generator().manual_seed(5))
    before = model.hidden(tokens, context)
    found = torch.zeros(S, S, B, dtype=torch.bool)
    for key in range(S):
        for sample in range(B):
            changed = tokens.clone()
            changed[key, sample] = (changed[key, sample] + 1) % 50
            is_other = (model.hidden(changed, context) != before).any(-1)
            assert not is_other[:, 1 - sample].any(), "samples depend on each other"
            found[:, key, sample] = is_other[:, sample]
    return found


def expected_reach(num_layers: int, window: int, document_SB: Tensor | None) -> Tensor:
    one_layer = torch.zeros(S, S, B, dtype=torch.bool)
    for query in range(S):
        for key in range(query + 1):
            for sample in range(B):
                is_near = window == 0 or query - key < window
                one_layer[query, key, sample] = is_near and (
                    document_SB is None or bool(document_SB[query, sample] == document_SB[key, sample])
                )
    found = one_layer
    for _ in range(num_layers - 1):  # The next layer sees the reach of the previous layer.
        found = torch.einsum("qmb,mkb->qkb", found.double(), one_layer.double()) > 0
    return found


@pytest.mark.slow(
    kept=[
        "1-1-False-learned-parallel",
        "1-1-True-learned-parallel",
        "1-4-False-learned-parallel",
        "1-4-False-rope-parallel",
        "1-4-True-learned-parallel",
        "1-0-False-learned-parallel",
    ]
)
@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("num_layers", "window"), [(1, 0), (1, 1), (1, 4), (1, S), (2, 3), (2, 0)])
def test_hidden_states_depend_on_the_tokens_in_reach(
    num_layers: int, window: int, has_documents: bool, positions: str, block: str
) -> None:
    document_SB = DOCUMENTS if has_documents else None
    model = build(num_layers=num_layers, window_size=window, positions=positions, block=block)

    assert torch.equal(reach(model, document_SB), expected_reach(num_layers, window, document_SB))


def test_packed_document_is_as_if_alone() -> None:
    """Rotary positions are relative, so a document has the same hidden states at any position."""
    model = build(num_layers=2, positions="rope", num_kv_heads=1)
    tokens = torch.randint(0, 50, (S, B), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        packed = model.hidden(tokens, TokenContext(torch.arange(B), S, pack_documents(DOCUMENTS)))
        alone = model.hidden(tokens[2:6, :1], TokenContext(torch.arange(1), 4))

    torch.testing.assert_close(packed[2:6, :1], alone, rtol=1e-10, atol=1e-10)


def test_window_as_long_as_the_sequence_is_no_window() -> None:
    tokens = torch.randint(0, 50, (S, B), generator=torch.Generator().manual_seed(5))
    context = TokenContext(torch.arange(B), S)
    with torch.no_grad():
        assert torch.equal(build(window_size=S).hidden(tokens, context), build().hidden(tokens, context))


def test_kept_rotary_tables_of_one_length_do_not_serve_another() -> None:
    model = build(positions="rope")
    tokens = torch.randint(0, 50, (S, B), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        long = model.hidden(tokens, TokenContext(torch.arange(B), S))
        short = model.hidden(tokens[:4], TokenContext(torch.arange(B), 4))
        again = model.float().hidden(tokens[:4], TokenContext(torch.arange(B), 4))

    torch.testing.assert_close(short, long[:4], rtol=1e-12, atol=1e-12)
    assert again.dtype == torch.float32
    torch.testing.assert_close(again.double(), short, rtol=1e-4, atol=1e-4)
