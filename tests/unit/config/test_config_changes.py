"""Changes of a configuration that make another model, and sizes of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config.changes import model_changes, training_changes, weight_changes
from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.config.model_size import num_parameters, parameters_by_part
from tests.helpers.variant_package import on_the_path, write_variant_package

BASE: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 90, "seq_len": 16, "hidden_size": 32, "num_layers": 4, "num_heads": 8},
    "batch": {"global_batch_size": 8},
    "train": {"steps": 5},
    "optimizer": {"lr": 1e-3},
}


def config(**changes: dict[str, Any]) -> Config:
    return Config.from_dict({name: {**BASE.get(name, {}), **changes.get(name, {})} for name in {**BASE, **changes}})


ROPE = {"positions": "rope"}
LLAMA3 = {**ROPE, "rope_scaling": "llama3", "rope_scaling_factor": 8.0}


def test_changed_model_is_reported_with_its_key() -> None:
    for before, key, value in [
        ({}, "num_layers", 2),
        ({}, "window_size", 8),
        ({}, "seq_len", 32),
        ({}, "block", "parallel"),
        (ROPE, "rope_theta", 500.0),
        (LLAMA3, "rope_low_freq_factor", 2.0),
        ({}, "has_tied_head", False),
    ]:
        changes = model_changes(config(model=before), config(model={**before, key: value}))
        assert [change.key for change in changes] == [f"model.{key}"]


def test_longer_sequences_keep_weights_without_a_table(tmp_path: Path) -> None:
    write_variant_package(tmp_path)
    with on_the_path(tmp_path):
        keys = {
            positions: [
                change.key
                for change in weight_changes(
                    config(model={"positions": positions}), config(model={"positions": positions, "seq_len": 32})
                )
            ]
            for positions in ("learned", "rope", "none", "counted", "leaning")
        }
    needed = ["model.seq_len"]
    assert keys == {"learned": needed, "rope": [], "none": [], "counted": needed, "leaning": []}


def test_equivalent_models_have_no_change() -> None:
    for before, change in [
        ({}, {"num_kv_heads": 8}),
        ({}, {"ffn_size": 128}),
        ({}, {"head_dim": 4}),
        ({}, {"rope_theta": 500.0}),
        (ROPE, {"rope_original_seq_len": 16}),
        ({}, {"dropout": 0.1}),
    ]:
        assert model_changes(config(model=before), config(model={**before, **change})) == [], change


def test_changes_of_training_are_listed_as_text() -> None:
    now = config(
        optimizer={"name": "lamb", "lr": 2e-3}, train={"steps": 9}, model={"dropout": 0.1}, fp8={"skip_layers": [0, 1]}
    )
    assert [str(change) for change in training_changes(config(), now)] == [
        "model.dropout: 0.0 -> 0.1",
        "train.steps: 5 -> 9",
        'optimizer.name: "adamw" -> "lamb"',
        "optimizer.lr: 0.001 -> 0.002",
        "fp8.skip_layers: [] -> [0, 1]",
    ]


@pytest.mark.parametrize(
    ("optimizer", "changed"),
    [({}, ["train.steps"]), ({"lr_decay_steps": 5}, []), ({"lr_schedule": "constant"}, [])],
)
def test_more_steps_are_a_change_if_the_decay_moves(optimizer: dict[str, Any], changed: list[str]) -> None:
    before = config(optimizer=optimizer)
    now = config(optimizer=optimizer, train={"steps": 9})
    assert [change.key for change in training_changes(before, now)] == changed


def test_parameters_of_gpt2_small() -> None:
    # The published checkpoint does not pad the vocabulary. Others: test_config_reference.py, tests/unit/hf
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
