"""Builds the modules of variants that other packages add."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain.config.model import ModelConfig
from megatrain.config.variant_parameters import own_parameters
from megatrain.config.variants import load_variant


def build_variant(config: ModelConfig, key: str, *arguments: Any) -> nn.Module:
    """Return the module of the variant that model.`key` names, with the parameters that it declares.

    The parameters have their unsharded shapes and are not initialized.
    """
    module: nn.Module = load_variant(key, getattr(config, key))(*arguments)
    for name, parameter in own_parameters(config, key).items():
        module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))
    return module
