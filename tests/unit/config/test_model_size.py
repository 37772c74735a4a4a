"""Parameter counts against published models and against a count by hand."""

from __future__ import annotations

import pytest

from megatrain.config import ModelConfig, num_parameters, parameters_by_part
from tests.helpers.published_models import LLAMA_3_8B


def test_llama_3_8b() -> None:
    # The number of parameters of the published checkpoint. Others: tests/unit/hf/test_hf_published_configs.py
    assert num_parameters(LLAMA_3_8B) == 8_030_261_248


def test_gpt2_small() -> None:
    # The number of parameters of the published checkpoint, which has no padding of the vocabulary.
    shape = {"vocab_size": 50257, "seq_len": 1024, "hidden_size": 768, "num_layers": 12, "num_heads": 12}
    assert num_parameters(ModelConfig(**shape, vocab_multiple=1)) == 124_439_808
    assert num_parameters(ModelConfig(**shape)) == 124_439_808 + (50304 - 50257) * 768


@pytest.mark.parametrize(
    ("changes", "block"),
    [
        # Norms, then weights and biases of qkv, attention output, up and down.
        ({}, 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)),
        ({"block": "parallel"}, 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)),
        ({"norm": "rmsnorm", "has_bias": False}, 2 * 8 + 8 * 24 + 8 * 8 + 8 * 32 + 32 * 8),
        ({"mlp": "swiglu", "ffn_size": 20, "has_bias": False}, 2 * 16 + 8 * 24 + 8 * 8 + 8 * 40 + 20 * 8),
        ({"has_bias": False, "has_qkv_bias": True}, 2 * 16 + (8 * 24 + 24) + 8 * 8 + 8 * 32 + 32 * 8),
        ({"has_bias": False, "qk_norm": "head"}, 2 * 16 + 8 * 24 + 4 + 4 + 8 * 8 + 8 * 32 + 32 * 8),
        ({"num_kv_heads": 1, "has_bias": False}, 2 * 16 + 8 * (8 + 2 * 4) + 8 * 8 + 8 * 32 + 32 * 8),
        ({"head_dim": 6, "has_bias": False}, 2 * 16 + 8 * 36 + 12 * 8 + 8 * 32 + 32 * 8),
    ],
)
def test_block(changes: dict[str, object], block: int) -> None:
    model = ModelConfig(vocab_size=10, seq_len=4, hidden_size=8, num_layers=3, num_heads=2, **changes)
    assert parameters_by_part(model).block == block


@pytest.mark.parametrize(("is_tied", "head"), [(True, 0), (False, 128 * 8)])
@pytest.mark.parametrize(("positions", "position"), [("learned", 4 * 8), ("rope", 0)])
def test_parts_around_the_blocks(is_tied: bool, head: int, positions: str, position: int) -> None:
    model = ModelConfig(
        vocab_size=10,
        seq_len=4,
        hidden_size=8,
        num_layers=3,
        num_heads=2,
        positions=positions,
        has_tied_head=is_tied,
    )
    size = parameters_by_part(model)

    assert (size.embedding, size.position, size.final_norm, size.head) == (128 * 8, position, 16, head)
    assert size.total == 128 * 8 + position + 3 * size.block + 16 + head


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "padded"),
    [(1, 128, 128), (128, 128, 128), (129, 128, 256), (50257, 128, 50304), (7, 1, 7)],
)
def test_padded_vocabulary(vocab_size: int, multiple: int, padded: int) -> None:
    model = ModelConfig(
        vocab_size=vocab_size, seq_len=4, hidden_size=8, num_layers=3, num_heads=2, vocab_multiple=multiple
    )
    assert model.padded_vocab_size == padded


def test_derived_sizes() -> None:
    model = ModelConfig(vocab_size=10, seq_len=4, hidden_size=8, num_layers=3, num_heads=2)
    assert (model.resolved_num_kv_heads, model.resolved_head_dim, model.resolved_ffn_size) == (2, 4, 32)
    model = ModelConfig(
        vocab_size=10, seq_len=4, hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=6, ffn_size=20
    )
    assert (model.resolved_num_kv_heads, model.resolved_head_dim, model.resolved_ffn_size) == (1, 6, 20)
