"""Windows of attention in config.json: sliding_window, and layer_types, which names each layer's kind of attention."""

from __future__ import annotations

from typing import Any

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(config: ConfigJson, *, default_every: int, default_window: int) -> dict[str, Any]:
    """Return window_size and full_attention_every. default_every: where the file has no layer_types.

    Raises: CheckpointError where the layers without a window are not each nth one.
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
