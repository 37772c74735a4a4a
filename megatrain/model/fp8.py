"""Replaces the matrix multiplications of projections by FP8 multiplications, layer by layer.

Shapes: P slots of a layer, three for each of its projections (input, weight, gradient); N steps of history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.fp8 import Fp8Config
from megatrain.model.linear import Product, Projection
from megatrain.model.transformer import Transformer
from megatrain.ops.fp8_linear import CurrentScaler, TensorwiseFp8Linear, rowwise_fp8_linear
from megatrain.ops.fp8_scaling import DelayedScaling
from megatrain.ops.optional_backends import import_transformer_engine
from megatrain.ops.quantization import E4M3, E5M2
from megatrain.ops.transformer_engine_linear import TransformerEngineLinear, planned_transformer_engine_linear

OPERAND_FORMATS = (E4M3, E4M3, E5M2)
"""The FP8 formats of a projection's input, weight and gradient."""


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """The delayed scales of the FP8 layers in a part of the model."""

    scaling: DelayedScaling
    layers: tuple[int, ...]

    def histories(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the history of each layer, for checkpoints. Shapes: history [P, N]."""
        num_slots = self.scaling.history_PN.shape[0] // len(self.layers)
        for layer, history in zip(self.layers, self.scaling.history_PN.split(num_slots), strict=True):
            yield f"blocks.{layer}", history


def use_fp8(model: Transformer, config: Fp8Config, device: torch.device) -> Fp8Scales | None:
    """Make the projections of `model`'s layers multiply in FP8, in the layers that `config` names.

    Returns the scales, which are kept from step to step; None without delayed scaling. On the meta device, the backend
    does not have to be installed.
    Raises: ImportError when the backend is not installed.
    """
    layers = tuple(layer for layer in model.part.layers if config.covers(layer))
    projections = [
        module for layer in layers for module in model.blocks[str(layer)].modules() if isinstance(module, Projection)
    ]
    if config.backend == "transformer_engine":
        if device.type == "meta":
            for projection in projections:
                projection.multiply = planned_transformer_engine_linear
            return None
        engine = import_transformer_engine()
        for projection in projections:
            projection.multiply = TransformerEngineLinear(engine)
        return None
    scaling = None
    if config.scaling == "delayed" and projections:
        scaling = DelayedScaling([*OPERAND_FORMATS] * len(projections), config.history_len, device)
    for number, projection in enumerate(projections):
        projection.multiply = _product(config, scaling, number * len(OPERAND_FORMATS))
    return None if scaling is None else Fp8Scales(scaling, layers)


def _product(config: Fp8Config, scaling: DelayedScaling | None, first_slot: int) -> Product:
    if config.recipe == "rowwise":
        return rowwise_fp8_linear
    if scaling is None:
        return TensorwiseFp8Linear(CurrentScaler(), CurrentScaler(), CurrentScaler())
    return TensorwiseFp8Linear(*(scaling.slot(first_slot + operand) for operand in range(len(OPERAND_FORMATS))))
