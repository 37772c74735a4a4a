"""The model on one device: the mathematics and the oracle of every parallel layout. No collective lives here."""

from megatrain.model.context import TokenContext
from megatrain.model.initial import initialise_
from megatrain.model.transformer import ModelPart, Transformer

__all__ = ["ModelPart", "TokenContext", "Transformer", "initialise_"]
