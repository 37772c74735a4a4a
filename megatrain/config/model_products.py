"""The multiplications of a model's forward pass: those of each token, and those of each pair of tokens in attention.

Matrix multiplications are counted; norms, biases, softmax and the embedding's look-up are not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.config.model import ModelConfig
from megatrain.config.pictures import encoder_of, patch_width


class Widths(NamedTuple):
    """The widths of a layer's matrices."""

    query: int
    """The width of all query heads together."""
    kv: int
    """The width of all key heads together, and of all value heads."""
    num_mlp_matrices: int


def widths_of(model: ModelConfig) -> Widths:
    """Return the widths of a layer's matrices."""
    return Widths(
        query=model.num_heads * model.resolved_head_dim,
        kv=model.resolved_num_kv_heads * model.resolved_head_dim,
        num_mlp_matrices=3 if model.is_mlp_gated else 2,
    )


def products_per_token(model: ModelConfig) -> int:
    """Return the multiplications of one token in the matrices of all layers and of the output head."""
    return _products_of_blocks(model) + model.hidden_size * model.vocab_size


def products_per_picture(model: ModelConfig) -> int:
    """Return the multiplications of a sample's picture in the encoder and the projector; 0 without pictures.

    Each patch attends to all patches.
    """
    if not model.has_pictures:
        return 0
    encoder = encoder_of(model)
    embedding = patch_width(model) * encoder.hidden_size
    projector = encoder.hidden_size * model.hidden_size + model.hidden_size**2
    pairs = encoder.num_layers * model.num_patches * products_per_pair(encoder)
    return model.num_patches * (embedding + _products_of_blocks(encoder) + pairs + projector)


def _products_of_blocks(model: ModelConfig) -> int:
    """Return the multiplications of one token in the matrices of all layers."""
    widths = widths_of(model)
    projections = model.hidden_size * (2 * widths.query + 2 * widths.kv)
    mlp = widths.num_mlp_matrices * model.hidden_size * model.resolved_ffn_size
    return model.num_layers * (projections + mlp)


def products_per_pair(model: ModelConfig) -> int:
    """Return the multiplications of a (query, key) pair in one layer: head_dim of each head for its score, and as many
    for its value."""
    return 2 * widths_of(model).query


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """How the compute time of a document grows with its length: a term for each token, and one for each pair of tokens.

    The unit is one (query, key) pair in one layer. per_token: all other products of a token. windows: the size of each
    window (0: none), and the number of layers that have it. per_picture: of a picture in the encoder and the projector,
    in addition to the tokens of its rows. All are integers, so that all hosts compute equal sums.
    """

    per_token: int
    windows: tuple[tuple[int, int], ...]
    per_picture: int = 0


def document_cost(model: ModelConfig) -> DocumentCost:
    """Return the cost of the documents of a sample, by the multiplications of the model."""
    windows = Counter(model.window_of(layer) for layer in range(model.num_layers))
    per_pair = products_per_pair(model)
    per_token, per_picture = (round(one(model) / per_pair) for one in (products_per_token, products_per_picture))
    return DocumentCost(per_token, tuple(sorted(windows.items())), per_picture)
