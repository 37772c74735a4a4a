"""Tensor and sequence parallelism of a chunk: shards its parameters by a table, and replaces some of its submodules.

Submodules with fixed names (branch_in, branch_out, ...) are replaced by modules that communicate. Between branch_out of
one branch and branch_in of the next, each rank holds S / tp rows of the sequence. The model is on the meta device when
the plan is applied, so no full weight ever exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatrain.comm.group import Group
from megatrain.comm.sequence_chunks import SequenceChunks
from megatrain.contracts.layout import NEAREST, Layout
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms
from megatrain.parallel.logical_matrices import HiddenWeight, matrices_of
from megatrain.parallel.placement import Placement, PlacementRow, placements_of, row_of, tensor_shape
from megatrain.parallel.recompute import SelectiveRecompute
from megatrain.parallel.sequence_chunks import ChunkedSublayers
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.styles import (
    GatherSequence,
    ReduceScatterSequence,
    SumOfHeads,
    VocabularyCrossEntropy,
    VocabularyRows,
    recompute_norm,
    recompute_output,
)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The settings of the plan of a chunk.

    table, layout: determine the placements. rank: the rank whose part of the chunk is built. recompute: "none",
    "selective" or "full".
    vocab_size: without the padding.
    group: the rank's tensor-parallel group, over which rows are exchanged.
    num_sequence_chunks: how many sequence chunks the branches exchange; with one, all rows at once. has_overlap:
    whether the collectives of chunks overlap with matrix multiplications. whole_layers: layers that never use sequence
    chunks, because they multiply in FP8.
    """

    table: Sequence[PlacementRow]
    layout: Layout
    rank: int
    group: Group
    recompute: str
    vocab_size: int
    loss_terms: LossTerms = CROSS_ENTROPY_ALONE
    num_sequence_chunks: int = 1
    has_overlap: bool = True
    whole_layers: Container[int] = ()


def apply_tensor_plan(chunk: nn.Module, plan: TensorPlan) -> tuple[list[LogicalParameter], SelectiveRecompute]:
    """Reduce the parameters of `chunk` (on meta) to this rank's part, and replace submodules by those of styles.py.

    Returns the chunk's parameters with the boxes that they hold, and the context in which its forward must run.
    Raises: TopologyError for a parameter that no row of the table matches, or that cannot be divided.
    """
    placements = {
        name: placements_of(name, parameter.shape, row_of(name, plan.table), plan.layout, plan.rank)
        for name, parameter in chunk.named_parameters(remove_duplicate=False)
    }
    _cut_parameters(chunk, placements)
    selective_recompute = SelectiveRecompute()
    _place_styles(chunk, plan, placements, selective_recompute)
    num_uses = Counter(id(parameter) for _, parameter in chunk.named_parameters(remove_duplicate=False))
    logical = [
        LogicalParameter(
            parameter,
            placements[name],
            0 if row_of(name, plan.table).may_lack_gradient else num_uses[id(parameter)],
            _hidden_weight(name, placements[name][0].global_shape, plan),
            is_vector=row_of(name, plan.table).is_vector,
        )
        for name, parameter in chunk.named_parameters()
    ]
    return logical, selective_recompute


def _hidden_weight(name: str, shape: tuple[int, ...], plan: TensorPlan) -> HiddenWeight | None:
    """Return the matrices of a hidden weight and each rank's boxes along the axis that cuts it; None for others."""
    row = row_of(name, plan.table)
    if not row.is_hidden_weight:
        return None
    axis = NEAREST if row.cut is None else row.cut.axis
    ranks = plan.layout.ranks_along(plan.rank, axis)
    held = (placements_of(name, shape, row, plan.layout, rank) for rank in ranks)
    boxes = tuple(tuple(placement.box for placement in placements) for placements in held)
    return HiddenWeight(matrices_of(name, shape, row.fused), boxes, axis)


def _cut_parameters(chunk: nn.Module, placements: Mapping[str, Sequence[Placement]]) -> None:
    cut: dict[int, nn.Parameter] = {}  # by identity, so that a tied parameter stays one object
    for name, parameter in list(chunk.named_parameters(remove_duplicate=False)):
        if id(parameter) not in cut:
            cut[id(parameter)] = nn.Parameter(parameter.new_empty(tensor_shape(placements[name])))
        _replace(chunk, name, cut[id(parameter)])


def _place_styles(
    chunk: nn.Module,
    plan: TensorPlan,
    placements: Mapping[str, Sequence[Placement]],
    selective_recompute: SelectiveRecompute,
) -> None:
    group, is_selective = plan.group, plan.recompute == "selective"
    chunks = SequenceChunks(group, plan.num_sequence_chunks, plan.has_overlap)
    for path, module in list(chunk.named_modules()):
        leaf = path.rsplit(".", 1)[-1]
        if leaf == "norm" and is_selective:
            recompute_norm(module, selective_recompute)
        elif leaf == "activation" and is_selective:
            recompute_output(module, selective_recompute)
        if group.size == 1:
            continue
        if leaf == "sublayers" and _has_chunks(plan, path):
            _replace(chunk, path, ChunkedSublayers(chunks, selective_recompute, keeps_rows=plan.recompute == "full"))
        elif leaf in ("branch_in", "branch_out") and _has_chunks(plan, path):
            continue  # the module around it was replaced
        elif leaf in ("branch_in", "head_in"):
            _replace(chunk, path, GatherSequence(group, selective_recompute))
        elif leaf in ("branch_out", "embedding_out"):
            _replace(chunk, path, ReduceScatterSequence(group))
        elif leaf == "over_ranks":
            # if there are more ranks than keys, a rank's last box is the key that it shares with other ranks
            _replace(chunk, path, SumOfHeads(group, placements[f"{_parent(path)}.weight"][-1].holders.count))
        elif path == "embedding.word":
            first_row = placements[f"{path}.weight"][0].box.offsets[0]
            _replace(chunk, path, VocabularyRows(module.weight, first_row))
        elif path == "loss_head.cross_entropy":
            first_column = placements["loss_head.weight"][0].box.offsets[0]
            style = VocabularyCrossEntropy(group, first_column, plan.vocab_size, plan.loss_terms)
            _replace(chunk, path, style)


def _has_chunks(plan: TensorPlan, path: str) -> bool:
    """Return whether the branch that contains `path` exchanges its rows in sequence chunks.

    The path has the layer's global number, which layers keep in every chunk. Patches have too few rows for chunks.
    """
    first, layer, *_ = path.split(".")
    return plan.num_sequence_chunks > 1 and first == "blocks" and int(layer) not in plan.whole_layers


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _replace(chunk: nn.Module, path: str, part: nn.Module | nn.Parameter) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(chunk.get_submodule(parent), leaf, part)
