"""The tensor- and sequence-parallel plan of a chunk: its parameters cut by a table of placements, its points replaced.

Between a branch's out point and the next one's in point each rank holds S / tp rows of the sequence. The model is on
the meta device when the plan is applied: no full weight ever exists.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatrain.comm.group import Group
from megatrain.comm.sequence_chunks import SequenceChunks
from megatrain.contracts.layout import Coordinate, Layout
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms
from megatrain.parallel.placement import Placement, PlacementRow, place, row_of, tensor_shape
from megatrain.parallel.rematerialize import Rematerializer
from megatrain.parallel.sequence_chunks import ChunkedMixing
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.styles import (
    GatherSequence,
    ReduceScatterSequence,
    VocabularyCrossEntropy,
    VocabularyRows,
    recompute_norm,
    recompute_output,
)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What to apply: the table of placements, whose rank's share to cut, how much to recompute, the true vocabulary.

    group: the rank's tensor-parallel one, along which rows are exchanged.
    num_sequence_chunks: in how many chunks the branches of a layer exchange their rows during their products, where
    more than one; has_overlap: or else above them. whole_layers: those with products of their own kind, whose branches
    exchange all rows at once.
    """

    table: Sequence[PlacementRow]
    layout: Layout
    coordinate: Coordinate
    group: Group
    recompute: str
    vocab_size: int
    loss_terms: LossTerms = CROSS_ENTROPY_ALONE
    num_sequence_chunks: int = 1
    has_overlap: bool = True
    whole_layers: Container[int] = ()


def apply_tensor_plan(chunk: nn.Module, plan: TensorPlan) -> tuple[list[LogicalParameter], Rematerializer]:
    """Cut `chunk` (on meta) to this rank's share and put the styles in place.

    Returns the chunk's parameters with the boxes they hold, and the context in which its forward must run.
    Raises: TopologyError for a parameter that the table does not name or whose dim does not divide.
    """
    placements = {
        name: place(name, parameter.shape, row_of(name, plan.table), plan.layout, plan.coordinate)
        for name, parameter in chunk.named_parameters(remove_duplicate=False)
    }
    _cut_parameters(chunk, placements)
    rematerializer = Rematerializer()
    _place_styles(chunk, plan, placements, rematerializer)
    logical = [LogicalParameter(parameter, placements[name]) for name, parameter in chunk.named_parameters()]
    return logical, rematerializer


def _cut_parameters(chunk: nn.Module, placements: Mapping[str, Sequence[Placement]]) -> None:
    cut: dict[int, nn.Parameter] = {}  # by identity, so that a tied parameter stays one object
    for name, parameter in list(chunk.named_parameters(remove_duplicate=False)):
        if id(parameter) not in cut:
            cut[id(parameter)] = nn.Parameter(parameter.new_empty(tensor_shape(placements[name])))
        _replace(chunk, name, cut[id(parameter)])


def _place_styles(
    chunk: nn.Module, plan: TensorPlan, placements: Mapping[str, Sequence[Placement]], rematerializer: Rematerializer
) -> None:
    group, is_selective = plan.group, plan.recompute == "selective"
    chunks = SequenceChunks(group, plan.num_sequence_chunks, plan.has_overlap)
    for path, module in list(chunk.named_modules()):
        leaf = path.rsplit(".", 1)[-1]
        if leaf == "norm" and is_selective:
            recompute_norm(module, rematerializer)
        elif leaf == "activation" and is_selective:
            recompute_output(module, rematerializer)
        if group.size == 1:
            continue
        if leaf == "mixing" and _has_chunks(plan, path):
            _replace(chunk, path, ChunkedMixing(chunks, rematerializer, keeps_rows=plan.recompute == "full"))
        elif leaf in ("branch_in", "branch_out") and _has_chunks(plan, path):
            continue  # of a mixing that was replaced
        elif leaf in ("branch_in", "head_in"):
            _replace(chunk, path, GatherSequence(group, rematerializer))
        elif leaf in ("branch_out", "embedding_out"):
            _replace(chunk, path, ReduceScatterSequence(group))
        elif path == "embedding.word":
            first_row = placements[f"{path}.weight"][0].box.offsets[0]
            _replace(chunk, path, VocabularyRows(module.weight, first_row))
        elif path == "loss_head.cross_entropy":
            first_column = placements["loss_head.weight"][0].box.offsets[0]
            style = VocabularyCrossEntropy(group, first_column, plan.vocab_size, plan.loss_terms)
            _replace(chunk, path, style)


def _has_chunks(plan: TensorPlan, path: str) -> bool:
    """Whether the branch in which `path` lies exchanges its rows in chunks; layers keep their number in all parts."""
    _, layer, _ = path.split(".", 2)
    return plan.num_sequence_chunks > 1 and int(layer) not in plan.whole_layers


def _replace(chunk: nn.Module, path: str, part: nn.Module | nn.Parameter) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(chunk.get_submodule(parent), leaf, part)
