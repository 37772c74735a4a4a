"""Changes of a configuration that make another model, and those that change only the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.config.changes import model_changes, training_changes, weight_changes
from megatrain.config.config import Config
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
        'optimizer.name: "adamw" -> "lamb"',
        "optimizer.lr: 0.001 -> 0.002",
        "fp8.skip_layers: [] -> [0, 1]",
    ]
