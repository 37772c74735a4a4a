"""The placements of the parameters of the decoder, and of the encoder of pictures, whose blocks are placed alike.

Column-parallel weights are sharded along their outputs, row-parallel weights along their inputs (Megatron-LM,
arXiv:1909.08053). Between residual branches, each tp rank computes only its own rows of the sequence. So its gradient
of a parameter that is not sharded covers only these rows, and is summed over tp.
If there are more tp ranks than key-value heads, consecutive ranks compute queries of the same group: each holds its own
queries, and all hold the group's key and value.
Shapes: V vocabulary, H hidden, E hidden of the encoder, C bytes of a patch, N query heads, G key-value heads, R =
N / G, D head dim, F ffn, P = 2 with a gate, or 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatrain.config.model import ModelConfig
from megatrain.config.pictures import ENCODER
from megatrain.config.variant_parameters import parameters_by_path
from megatrain.parallel.placement import PIPELINE_ENDS, Cut, Fused, PlacementRow

_QKV = Fused(dim=1, names=("q", "k", "v"), splits_first=True)
_QK = Fused(dim=1, names=("q", "k"), splits_first=True)
_QUERIES = Fused(dim=1, names=("q",), splits_first=True)
_GATE_UP = Fused(dim=0, names=("gate", "up"))
_WORD = PlacementRow("embedding.word.weight", Cut("tp", 0))  #  [V, H]  rows of the vocabulary
_HEAD = PlacementRow("loss_head.weight", Cut("tp", 0))  #       [V, H]  columns of the logits
_TABLE = (
    PlacementRow("embedding.position", sum_groups=("tp",)),
    PlacementRow("blocks.*.norm.weight", sum_groups=("tp",)),
    PlacementRow("blocks.*.norm.bias", sum_groups=("tp",)),
    PlacementRow("blocks.*.output_norm.weight", sum_groups=("tp",)),
    PlacementRow("blocks.*.output_norm.bias", sum_groups=("tp",)),
    PlacementRow("blocks.*.attention.query_norm.weight", sum_groups=("tp",)),  # [D]  for all heads
    PlacementRow("blocks.*.attention.key_norm.weight", sum_groups=("tp",)),
    PlacementRow("blocks.*.attention.all_heads_norm.weight", Cut("tp", 0), fused=_QK),  # [G, R+1, D]
    PlacementRow("blocks.*.attention.qkv.weight", Cut("tp", 0), fused=_QKV, is_hidden_weight=True),  # [G, R+2, D, H]
    PlacementRow("blocks.*.attention.qkv.bias", Cut("tp", 0), fused=_QKV),
    PlacementRow("blocks.*.attention.out.weight", Cut("tp", 1), is_hidden_weight=True),  #              [H, N*D]
    PlacementRow("blocks.*.mlp.up.weight", Cut("tp", 1), fused=_GATE_UP, is_hidden_weight=True),  #     [P, F, H]
    PlacementRow("blocks.*.mlp.up.bias", Cut("tp", 1), fused=_GATE_UP),
    PlacementRow("blocks.*.mlp.down.weight", Cut("tp", 1), is_hidden_weight=True),  #                   [H, F]
    PlacementRow("blocks.*.attention_bias", sum_groups=("tp",)),
    PlacementRow("blocks.*.mlp_bias", sum_groups=("tp",)),
    PlacementRow("loss_head.norm.weight", sum_groups=("tp",)),
    PlacementRow("loss_head.norm.bias", sum_groups=("tp",)),
)
_PICTURES = (
    *(replace(row, pattern=f"{ENCODER}{row.pattern}") for row in _TABLE if row.pattern.startswith("blocks.")),
    PlacementRow("encoder.patch.weight", sum_groups=("tp",)),  #  [E, C]  each tp rank embeds its own patches
    PlacementRow("encoder.patch.bias", sum_groups=("tp",)),
    PlacementRow("encoder.position", sum_groups=("tp",)),
    PlacementRow("encoder.norm.weight", sum_groups=("tp",)),
    PlacementRow("encoder.norm.bias", sum_groups=("tp",)),
    PlacementRow("projector.up.weight", Cut("tp", 1), is_hidden_weight=True),  #    [1, H, E]
    PlacementRow("projector.up.bias", Cut("tp", 1)),
    PlacementRow("projector.down.weight", Cut("tp", 1), is_hidden_weight=True),  #  [H, H]
    PlacementRow("projector.bias", sum_groups=("tp",)),
)


def decoder_table(model: ModelConfig | None = None, *, has_two_ends: bool = False) -> tuple[PlacementRow, ...]:
    """Return the rows of all parameters.

    model: variants from other packages add rows for their parameters; None for a model without such variants.
    has_two_ends: whether a tied embedding is used on two different stages.
    """
    rows = (*_TABLE, *_PICTURES) if model is None else (*_variant_rows(model), *_TABLE, *_PICTURES)
    if not has_two_ends:
        return (_WORD, *rows, _HEAD)
    word = replace(_WORD, sum_groups=(PIPELINE_ENDS,))
    return (word, *rows, replace(word, pattern=_HEAD.pattern, logical_name=word.pattern))


def _variant_rows(model: ModelConfig) -> Iterator[PlacementRow]:
    for path, parameter in parameters_by_path(model).items():
        if parameter.declared.dims[:1] in ("F", "G"):
            fused = _QUERIES if parameter.declared.dims[0] == "G" else None
            yield PlacementRow(f"*.{path}", Cut("tp", 0), fused=fused, is_vector=True)
        else:
            # each tp rank applies it to its own units, heads or rows
            yield PlacementRow(f"*.{path}", sum_groups=("tp",), is_vector=True)
