"""Parameter counts compared with published models and with a manual count."""

from __future__ import annotations

import pytest

from megatrain.config import ModelConfig, num_parameters, parameters_by_part


def test_parameters_of_gpt2_small() -> None:
    # The published checkpoint does not pad the vocabulary. Others: test_config_files.py, tests/unit/hf
    shape = {"vocab_size": 50257, "seq_len": 1024, "hidden_size": 768, "num_layers": 12, "num_heads": 12}
    assert num_parameters(ModelConfig(**shape, vocab_multiple=1)) == 124_439_808
    assert num_parameters(ModelConfig(**shape)) == 124_439_808 + (50304 - 50257) * 768


SMALL = {"vocab_size": 10, "seq_len": 4, "hidden_size": 8, "num_layers": 3, "num_heads": 2}
BLOCKS: list[tuple[dict[str, object], int]] = [
    # Norms, then weights and biases of qkv, attention output, up and down.
    ({}, 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)),
    ({"block": "parallel"}, 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)),
    ({"norm": "rmsnorm", "has_bias": False}, 2 * 8 + 8 * 24 + 8 * 8 + 8 * 32 + 32 * 8),
    ({"mlp": "swiglu", "ffn_size": 20, "has_bias": False}, 2 * 16 + 8 * 24 + 8 * 8 + 8 * 40 + 20 * 8),
    ({"has_bias": False, "has_qkv_bias": True}, 2 * 16 + (8 * 24 + 24) + 8 * 8 + 8 * 32 + 32 * 8),
    ({"has_bias": False, "qk_norm": "head"}, 2 * 16 + 8 * 24 + 4 + 4 + 8 * 8 + 8 * 32 + 32 * 8),
    ({"num_kv_heads": 1, "has_bias": False}, 2 * 16 + 8 * (8 + 2 * 4) + 8 * 8 + 8 * 32 + 32 * 8),
    ({"head_dim": 6, "has_bias": False}, 2 * 16 + 8 * 36 + 12 * 8 + 8 * 32 + 32 * 8),
]


def test_parameters_of_a_block_are_those_counted_by_hand() -> None:
    for changes, block in BLOCKS:
        assert parameters_by_part(ModelConfig(**SMALL, **changes)).block == block, changes


@pytest.mark.parametrize(("is_tied", "head"), [(True, 0), (False, 128 * 8)])
@pytest.mark.parametrize(("positions", "position"), [("learned", 4 * 8), ("rope", 0), ("none", 0)])
def test_parts_around_the_blocks(is_tied: bool, head: int, positions: str, position: int) -> None:
    size = parameters_by_part(ModelConfig(**SMALL, positions=positions, has_tied_head=is_tied))

    assert (size.embedding, size.position, size.final_norm, size.head) == (128 * 8, position, 16, head)
    assert size.total == 128 * 8 + position + 3 * size.block + 16 + head


def test_vocabulary_is_padded_to_a_multiple() -> None:
    for vocab_size, multiple, padded in [(1, 128, 128), (128, 128, 128), (129, 128, 256), (7, 1, 7)]:
        model = ModelConfig(**{**SMALL, "vocab_size": vocab_size}, vocab_multiple=multiple)
        assert model.padded_vocab_size == padded, (vocab_size, multiple)


def test_sizes_that_are_not_set_follow_from_others() -> None:
    model = ModelConfig(**SMALL)
    assert (model.resolved_num_kv_heads, model.resolved_head_dim, model.resolved_ffn_size) == (2, 4, 32)
    model = ModelConfig(**SMALL, num_kv_heads=1, head_dim=6, ffn_size=20)
    assert (model.resolved_num_kv_heads, model.resolved_head_dim, model.resolved_ffn_size) == (1, 6, 20)
