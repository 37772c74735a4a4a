"""Gemma 2: Llama with soft caps, a norm before and after each sublayer, and a window in every second layer.

Its norms scale by 1 + weight, the embedding is multiplied by sqrt(hidden_size), and the gate is GELU. In config.json,
sliding_window is the size of the windows, and layer_types names each layer's kind of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.llama import Llama

_FULL, _SLIDING = "full_attention", "sliding_attention"

_CAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "head_softcap"}
_FREE = ("full_attention_every", "attention_scale", "attention_softcap", "head_softcap")


def read_windows(config: ConfigJson, *, default_every: int, default_window: int) -> dict[str, Any]:
    """Return window_size and full_attention_every. default_every: the value if the file has no layer_types.

    Raises: CheckpointError when the layers without a window are not exactly every n-th layer.
    """
    num_layers = config.count("num_hidden_layers")
    types = config.texts("layer_types", default=_layer_types(num_layers, default_every))
    window_size = config.count("sliding_window", default=default_window)
    if types == [_FULL] * num_layers:
        return {"window_size": 0, "full_attention_every": 0}
    for every in (0, *range(2, num_layers + 1)):
        if types == _layer_types(num_layers, every):
            return {"window_size": window_size, "full_attention_every": every}
    raise config.refusal(
        "layer_types",
        f'only "{_FULL}" in each nth of {num_layers} layers and "{_SLIDING}" in the others can be computed here',
    )


def written_windows(model: ModelConfig) -> dict[str, Any]:
    """Return sliding_window and layer_types."""
    types = _layer_types(model.num_layers, model.full_attention_every) if model.window_size else None
    return {
        "sliding_window": model.window_size or model.seq_len,
        "layer_types": types or [_FULL] * model.num_layers,
    }


def _layer_types(num_layers: int, every: int) -> list[str]:
    return [_FULL if every and (layer + 1) % every == 0 else _SLIDING for layer in range(num_layers)]


class Gemma2(Llama):
    """Gemma2ForCausalLM."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **{key: value for key, value in Llama.fixed.items() if key not in _FREE},
        "norm": "rmsnorm_zero_centered",
        "branch_norm": "both",
        "mlp": "geglu",
        "has_bias": False,
        "has_qkv_bias": False,
        "has_scaled_embedding": True,
    }
    has_window = True
    default_caps: ClassVar[Mapping[str, float]] = {"attention_softcap": 50.0, "head_softcap": 30.0}
    """The caps if the file lacks their keys. A key with the value null means no cap."""
    # Gemma reads hidden_activation; the files also have hidden_act
    ignored: ClassVar[frozenset[str]] = frozenset({"hidden_act", "cache_implementation"})
    activation_key = "hidden_activation"
    activations = ("gelu_pytorch_tanh",)
    is_tied_by_default = True

    def default_every(self, config: ConfigJson) -> int:
        """Return full_attention_every for a file without layer_types."""
        return 2

    def problems(self, model: ModelConfig) -> list[str]:
        found = super().problems(model)
        if model.attention_scale and _scalar(model) ** -0.5 != model.attention_scale:
            found.append(
                f"model.attention_scale={model.attention_scale} cannot be exported: {self.architecture} supports "
                f"only 1 / sqrt(n) of a whole number n"
            )
        return found

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": False,
            "query_pre_attn_scalar": _scalar(model),
            **{theirs: getattr(model, ours) or None for theirs, ours in _CAPS.items()},
            **written_windows(model),
        }

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        config.require("attention_bias", (False,), default=False)
        config.require("use_bidirectional_attention", (False,), default=False)
        scalar = config.number("query_pre_attn_scalar", default=256)
        head_dim = config.count("head_dim", default=256)
        found: dict[str, Any] = {
            "head_dim": head_dim,
            "num_kv_heads": config.count("num_key_value_heads", default=4),
            "attention_scale": 0.0 if scalar == head_dim else scalar**-0.5,
            **read_windows(config, default_every=self.default_every(config), default_window=4096),
        }
        for theirs, ours in _CAPS.items():
            if ours in self.fixed:
                config.require(theirs, (None,), default=None)
            else:
                is_capped = theirs in config or (not config.has_null(theirs) and ours in self.default_caps)
                default = self.default_caps.get(ours)
                found[ours] = config.number(theirs, default=default) if is_capped else 0.0
        return found


def _scalar(model: ModelConfig) -> int:
    return round(model.attention_scale**-2) if model.attention_scale else model.resolved_head_dim
