"""Rotary positions in config.json: the base, the stretching to a longer context, and the rotated part of a head.

Files of transformers 4 have rope_theta and rope_scaling; files of transformers 5 have both in rope_parameters. Both
forms are read. Exports use the keys of version 4, which both versions read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson

_TYPE_OF = {"none": "default", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
SCALINGS: Mapping[str, str] = {theirs: ours for ours, theirs in _TYPE_OF.items()}
"""rope_type in config.json -> value of model.rope_scaling."""
_NUMBERS: Mapping[str, Mapping[str, tuple[str, float | None]]] = {
    "none": {},
    "linear": {},
    "dynamic": {},
    "yarn": {
        "beta_fast": ("rope_beta_fast", 32.0),
        "beta_slow": ("rope_beta_slow", 1.0),
        "attention_factor": ("rope_attention_factor", 0.0),
    },
    "llama3": {
        "low_freq_factor": ("rope_low_freq_factor", None),
        "high_freq_factor": ("rope_high_freq_factor", None),
    },
}
"""The numbers of a scaling besides its factor: key in config.json -> (key of [model], default; None: required)."""


def rope_section(config: ConfigJson) -> ConfigJson:
    """Return the object that describes the scaling; empty if there is none."""
    return config.section("rope_scaling" if "rope_scaling" in config else "rope_parameters")


def read_rope(
    config: ConfigJson, rope: ConfigJson, scalings: Mapping[str, str] = SCALINGS, default_theta: float = 10000.0
) -> dict[str, Any]:
    """Return the keys of [model] for positions that `rope` (or `config`, for the base) describes.

    scalings: the rope_types that the family supports -> values of model.rope_scaling.
    """
    type_key = "rope_type" if "rope_type" in rope else "type"
    rope.require(type_key, tuple(scalings), default="default")
    if "type" in rope:  # the older name in addition to the newer one
        rope.require("type", (rope.text(type_key),), default=None)
    scaling = scalings[rope.text(type_key, default="default")]
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=default_theta))
    factor = rope.number("factor", default=None if scaling != "none" else 1.0)
    found: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling != "none":
        found["rope_scaling_factor"] = factor
    for key, (ours, default) in _NUMBERS[scaling].items():
        found[ours] = rope.number(key, default=default)
    if scaling == "yarn":
        rope.require("truncate", (True,), default=True)
    longest = config.count("max_position_embeddings")
    if scaling == "dynamic":  # transformers always grows the base beyond max_position_embeddings
        rope.require("original_max_position_embeddings", (longest,), default=longest)
        found["rope_original_seq_len"] = longest
    if scaling in ("yarn", "llama3"):
        found["rope_original_seq_len"] = rope.count("original_max_position_embeddings", default=longest)
    if factor == 1.0:  # scaling by 1 changes nothing
        return {"rope_theta": theta, "rope_scaling": "none"}
    return found


def require_whole_heads(config: ConfigJson, rope: ConfigJson) -> None:
    """Raise CheckpointError if only a part of each head is rotated."""
    for section in (config, rope):
        section.require("partial_rotary_factor", (1.0,), default=1.0)


def written_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return the value of rope_scaling."""
    scaling = model.rope_scaling
    if scaling == "none":
        return None
    written: dict[str, Any] = {"rope_type": _TYPE_OF[scaling], "factor": model.rope_scaling_factor}
    for key, (ours, default) in _NUMBERS[scaling].items():
        if getattr(model, ours) != default:
            written[key] = getattr(model, ours)
    if scaling in ("yarn", "llama3"):
        written["original_max_position_embeddings"] = model.rope_original_seq_len
    return written


def written_length(model: ModelConfig) -> int:
    """Return the value of max_position_embeddings."""
    return model.rope_original_seq_len if model.rope_scaling == "dynamic" else model.seq_len


def length_notes(model: ModelConfig) -> list[str]:
    """Return a sentence if the files do not contain model.seq_len."""
    if written_length(model) == model.seq_len:
        return []
    note = f'model.seq_len={model.seq_len} is not in config.json: with rope_scaling="dynamic", max_position_embeddings '
    return [f"{note}is model.rope_original_seq_len={model.rope_original_seq_len}"]
