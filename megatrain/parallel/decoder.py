"""The placements of the decoder's parameters.

Column-parallel weights are cut along their outputs, row-parallel weights along their inputs (Megatron-LM,
arXiv:1909.08053). Between residual branches, each tp rank computes only its own rows of the sequence. So its gradient
of a parameter that is not cut covers only these rows, and is summed over tp.
Where there are more tp ranks than key-value heads, neighbours compute queries of one group: each holds its own queries,
and all hold the group's key and value.
Shapes: V vocabulary, H hidden, N query heads, G key-value heads, R = N / G, D head dim, F ffn, P = 2 with a gate, or 1.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.parallel.placement import PIPELINE_ENDS, Cut, Fused, PlacementRow

_QKV = Fused(dim=1, names=("q", "k", "v"), splits_first=True)
_QK = Fused(dim=1, names=("q", "k"), splits_first=True)
_GATE_UP = Fused(dim=0, names=("gate", "up"))
_WORD = PlacementRow("embedding.word.weight", Cut("tp", 0))  #  [V, H]  rows of the vocabulary
_HEAD = PlacementRow("loss_head.weight", Cut("tp", 0))  #       [V, H]  columns of the logits
_TABLE = (
    PlacementRow("embedding.position", sum_groups=("tp",)),
    PlacementRow("blocks.*.norm.weight", sum_groups=("tp",)),
    PlacementRow("blocks.*.norm.bias", sum_groups=("tp",)),
    PlacementRow("blocks.*.output_norm.weight", sum_groups=("tp",)),
    PlacementRow("blocks.*.output_norm.bias", sum_groups=("tp",)),
    PlacementRow("blocks.*.attention.query_norm.weight", sum_groups=("tp",)),  # [D]  of all heads, a rank has some
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


def decoder_table(*, has_two_ends: bool = False) -> tuple[PlacementRow, ...]:
    """Return the rows of all parameters. has_two_ends: whether a tied embedding is used on two different stages."""
    if not has_two_ends:
        return (_WORD, *_TABLE, _HEAD)
    word = replace(_WORD, sum_groups=(PIPELINE_ENDS,))
    return (word, *_TABLE, replace(word, pattern=_HEAD.pattern, logical_name=word.pattern))
