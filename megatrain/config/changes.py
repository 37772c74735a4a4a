"""The differences between the configuration that wrote a checkpoint and the one that resumes from it.

Pure functions: no I/O and no clock. Keys are compared by what they resolve to: `num_kv_heads = 0` and `num_kv_heads =
num_heads` are the same model.
"""

from __future__ import annotations

from typing import Any

from megatrain.config.config import Config
from megatrain.config.model import SCALING_KEYS, SCALING_KEYS_OF, ModelConfig
from megatrain.config.options import Value
from megatrain.config.sections import all_options, section_classes
from megatrain.config.toml_text import value_text
from megatrain.config.variant_parameters import own_parameters
from megatrain.run_files.config_changes import ChangedKey

FREE_MODEL_KEYS = frozenset({"dropout", "init_std", "is_residual_init_scaled"})
"""Keys of [model] that do not affect what the trained weights compute."""

_FUNCTION_KEYS = frozenset(
    {"window_size", "full_attention_every", "norm_eps", "attention_scale", "attention_softcap", "head_softcap"}
)
"""Keys of [model] that change the computation, but not which weights it needs."""

_RESOLVED = {
    "num_kv_heads": "resolved_num_kv_heads",
    "head_dim": "resolved_head_dim",
    "ffn_size": "resolved_ffn_size",
    "vocab_multiple": "padded_vocab_size",
}
_TRAINING_SECTIONS = ("batch", "train", "optimizer", "data", "pictures", "fp8")
_NUMBERED_SECTIONS = ("parameter_group", "data_source", "data_stage", "validation_set")
_NEUTRAL_KEYS = frozenset(
    {
        "train.steps",
        "train.gc_interval",
        "train.checksum_interval",
        "data.prefetch",
        "data.balance",
        "data.loader",
        "data.cache_directory",
        "data.cache_bytes",
        "data.cache_block_bytes",
        "data.readahead_blocks",
        "data.accepted_digest",
        "pictures.producers",
        "pictures.threads",
        "pictures.addresses",
        "pictures.secret",
    }
)
"""Keys that affect how training runs, but not its numerical results; train.steps only if `_moves_decay` is false."""


def model_changes(before: Config, now: Config) -> list[ChangedKey]:
    """Return the changed keys of [model] with which the model is not the one in the checkpoint."""
    keys = [name for name in all_options()["model"] if name not in FREE_MODEL_KEYS]
    return [
        _changed(f"model.{name}", getattr(before.model, name), getattr(now.model, name))
        for name in keys
        if _meaning(before.model, name) != _meaning(now.model, name)
    ]


def run_changes(before: Config, now: Config) -> list[ChangedKey]:
    """Return the `model_changes` after which a run cannot continue.

    A change of model.seq_len is among them only if a parameter has this length as a dim. Otherwise the change affects
    no weight, and it affects samples only if data.seq_len is 0; `lengths_problem` (checkpoint/continued_lengths.py)
    checks that.
    """
    changes = model_changes(before, now)
    return [change for change in changes if change.key != "model.seq_len" or _has_length_dim(now.model)]


def weight_changes(before: Config, now: Config) -> list[ChangedKey]:
    """Return the `model_changes` after which the stored weights cannot be used."""
    return [change for change in model_changes(before, now) if not _changes_only_function(change, now)]


def _changes_only_function(change: ChangedKey, now: Config) -> bool:
    name = change.key.removeprefix("model.")
    if name == "seq_len":
        return not _has_length_dim(now.model)
    return name in _FUNCTION_KEYS or name.startswith("rope_")


def _has_length_dim(model: ModelConfig) -> bool:
    """Return whether parameters have model.seq_len as one of their dims."""
    own = own_parameters(model, "positions").values()
    return model.positions == "learned" or any("S" in one.declared.dims for one in own)


def training_changes(before: Config, now: Config) -> list[ChangedKey]:
    """Return the changes outside `model_changes` that affect the numerical results of the run."""
    keys = [("model", name) for name in sorted(FREE_MODEL_KEYS)]
    keys += [(section, name) for section in _TRAINING_SECTIONS for name in all_options()[section]]
    defaults: dict[str, Any] = {}
    for kind in _NUMBERED_SECTIONS:
        names = {**before.sections_of(kind), **now.sections_of(kind)}
        keys += [(section, name) for section in names for name in all_options()[kind]]
        # a numbered section that one configuration lacks has default values in it
        defaults |= dict.fromkeys(names, section_classes()[kind]())
    sections = [{**defaults, **config.sections} for config in (before, now)]
    changes = []
    for section, name in keys:
        values = [getattr(found[section], name) for found in sections]
        key = f"{section}.{name}"
        is_neutral = key in _NEUTRAL_KEYS and not (key == "train.steps" and _moves_decay(before, now))
        if values[0] != values[1] and not is_neutral:
            changes.append(_changed(key, values[0], values[1]))
    return changes


def _moves_decay(before: Config, now: Config) -> bool:
    """Return whether another train.steps moves the end of the learning rate's decay (optimizer.lr_decay_steps = 0)."""
    ends_with_run = [
        config.optimizer.lr_schedule != "constant" and not config.optimizer.lr_decay_steps for config in (before, now)
    ]
    return any(ends_with_run) and before.resolved_lr_decay_steps != now.resolved_lr_decay_steps


def _changed(key: str, before: Value, now: Value) -> ChangedKey:
    return ChangedKey(key, value_text(before), value_text(now))


def _meaning(model: ModelConfig, name: str) -> Value:
    value: Value = getattr(model, _RESOLVED.get(name, name))
    if name.startswith("rope_") and not _is_used(model, name):
        return ""
    return value


def _is_used(model: ModelConfig, name: str) -> bool:
    if model.positions != "rope":
        return False
    return name not in SCALING_KEYS or name in SCALING_KEYS_OF.get(model.rope_scaling, SCALING_KEYS)
