"""The model on one device, which is the reference for every parallel layout. It runs no collectives."""

from megatrain.model.context import PatchRows, TokenContext
from megatrain.model.initial import initialize_
from megatrain.model.transformer import ModelPart, Transformer

__all__ = ["ModelPart", "PatchRows", "TokenContext", "Transformer", "initialize_"]
