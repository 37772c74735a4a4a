"""Oracles from transformers: models of our configuration with random weights, and the conversion of their weights to
ours.

The conversion is a permutation (plus zeros for the padding of the vocabulary), so it applies to gradients as well as
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.config.model import ModelConfig
from megatrain.hf.families import family_for_export
from megatrain.hf.tensor_map import parameter_shapes
from tests.helpers.require import lazy_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

transformers = lazy_module("transformers")

_WITHOUT_SDPA = ("gemma2",)


class WideFloats(TorchFunctionMode):
    """Computes in fp64 everything that is written in fp32: norms, softmax and rotary tables of transformers."""

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        def wide(one: Any) -> Any:
            return torch.float64 if one is torch.float32 else one

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wide, args), **{key: wide(kwarg) for key, kwarg in (kwargs or {}).items()})


def oracle(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model for `model` with random weights, norm scales and biases.

    In fp64, the model must be built and called in the context WideFloats.
    """
    family = family_for_export(model)
    config = transformers.AutoConfig.for_model(
        family.model_type,
        **family.write_config(model),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager" if family.model_type in _WITHOUT_SDPA else "sdpa",
    )
    found: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() == 1:
                is_scale = not name.endswith("bias") and model.norm != "rmsnorm_zero_centered"
                parameter.copy_(0.2 * noise + (1.0 if is_scale else 0.0))
            else:
                parameter.copy_(noise / math.sqrt(model.hidden_size))
    return found.eval()


def with_images(text: PreTrainedModel) -> PreTrainedModel:
    """Return a tiny Gemma 3 with images around the language model `text`."""
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=4)
    found: PreTrainedModel = transformers.Gemma3ForConditionalGeneration(config).eval()
    found.model.language_model.load_state_dict(text.model.state_dict())
    return found


def our_weights(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return tensors under our names and in our shapes, for weights or gradients with transformers' names.

    A tied head appears under both names, as in a state_dict.
    """
    ours: dict[str, Tensor] = {}
    for tensor in family_for_export(model).tensors(model):
        if not tensor.ranges:
            continue
        found = theirs[tensor.name]
        shape = parameter_shapes(model)[tensor.parameter]
        parameter = ours.setdefault(tensor.parameter, torch.zeros(shape, dtype=found.dtype))
        for view, other in tensor.matching_views(found, parameter):
            other.copy_(view)
    if model.has_tied_head:
        ours["loss_head.weight"] = ours["embedding.word.weight"]
    return ours
