"""The tensor- and sequence-parallel plan of the decoder: two tables, and the loop that applies them.

Column-parallel weights are cut along their outputs, row-parallel ones along their inputs (Megatron-LM,
arXiv:1909.08053); between a branch's out point and the next one's in point each rank holds S / tp rows of the sequence.
The model is on the meta device when the plan is applied: no full weight ever exists.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megatrain.comm.group import Group
from megatrain.comm.sequence_chunks import SequenceChunks
from megatrain.contracts.errors import TopologyError
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms
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

WHOLE = None
SHARDED_DIM: tuple[tuple[str, int | None], ...] = (
    ("embedding.word.weight", 0),  #             [V, H]        rows of the vocabulary
    ("embedding.position", WHOLE),
    ("blocks.*.norm.weight", WHOLE),
    ("blocks.*.norm.bias", WHOLE),
    ("blocks.*.attention.qkv.weight", 0),  #     [G, R+2, D, H] column-parallel: whole groups of heads
    ("blocks.*.attention.qkv.bias", 0),
    ("blocks.*.attention.out.weight", 1),  #     [H, N*D]      row-parallel
    ("blocks.*.mlp.up.weight", 1),  #            [P, F, H]     column-parallel: gate and up alike
    ("blocks.*.mlp.up.bias", 1),
    ("blocks.*.mlp.down.weight", 1),  #          [H, F]        row-parallel
    ("blocks.*.attention_bias", WHOLE),
    ("blocks.*.mlp_bias", WHOLE),
    ("loss_head.norm.weight", WHOLE),
    ("loss_head.norm.bias", WHOLE),
    ("loss_head.weight", 0),  #                  [V, H]        columns of the logits
)

TIED_ORIGINAL = "embedding.word.weight"
TIED_COPY = "loss_head.weight"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What to apply: the tensor-parallel group, how much to recompute, the true vocabulary and the loss.

    num_sequence_chunks: in how many chunks the branches of a layer exchange their rows during their products, where
    more than one; has_overlap: or else above them. whole_layers: those with products of their own kind, whose branches
    exchange all rows at once.
    """

    group: Group
    recompute: str
    vocab_size: int
    has_tied_head: bool
    is_head_elsewhere: bool
    """The tied embedding's two uses are on different stages."""
    loss_terms: LossTerms = CROSS_ENTROPY_ALONE
    num_sequence_chunks: int = 1
    has_overlap: bool = True
    whole_layers: Container[int] = ()


def apply_tensor_plan(chunk: nn.Module, plan: TensorPlan) -> tuple[list[LogicalParameter], Rematerializer]:
    """Cut `chunk` (on meta) to this rank's share and put the styles in place.

    Returns the chunk's parameters with the boxes they hold, and the context in which its forward must run.
    Raises: TopologyError for a parameter that the table does not name or whose dim does not divide.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in chunk.named_parameters()}
    _cut_parameters(chunk, plan.group)
    rematerializer = Rematerializer()
    _place_styles(chunk, plan, rematerializer)
    return _logical_parameters(chunk, plan, shapes), rematerializer


def _sharded_dim(name: str) -> int | None:
    for pattern, dim in SHARDED_DIM:
        if fnmatchcase(name, pattern):
            return dim
    raise TopologyError(f"parameter {name} is in no row of the tensor-parallel table; add one to SHARDED_DIM")


def _cut_parameters(chunk: nn.Module, group: Group) -> None:
    cut: dict[int, nn.Parameter] = {}  # by identity, so that a tied parameter stays one object
    for path, module in chunk.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            dim = _sharded_dim(name)
            if id(parameter) not in cut:
                shape = list(parameter.shape)
                if dim is not None:
                    if shape[dim] % group.size:
                        raise TopologyError(
                            f"{name} of shape {shape} cannot be cut in tp_size={group.size} parts along dim {dim}"
                        )
                    shape[dim] //= group.size
                cut[id(parameter)] = nn.Parameter(parameter.new_empty(shape))
            setattr(module, leaf, cut[id(parameter)])


def _place_styles(chunk: nn.Module, plan: TensorPlan, rematerializer: Rematerializer) -> None:
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
            _replace(chunk, path, VocabularyRows(module.weight, group.rank * module.weight.shape[0]))
        elif path == "loss_head.cross_entropy":
            columns = chunk.get_parameter(TIED_COPY).shape[0]
            style = VocabularyCrossEntropy(group, group.rank * columns, plan.vocab_size, plan.loss_terms)
            _replace(chunk, path, style)


def _has_chunks(plan: TensorPlan, path: str) -> bool:
    """Whether the branch in which `path` lies exchanges its rows in chunks; layers keep their number in all parts."""
    _, layer, _ = path.split(".", 2)
    return plan.num_sequence_chunks > 1 and int(layer) not in plan.whole_layers


def _replace(chunk: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(chunk.get_submodule(parent), leaf, module)


def _logical_parameters(
    chunk: nn.Module, plan: TensorPlan, shapes: Mapping[str, tuple[int, ...]]
) -> list[LogicalParameter]:
    found = []
    for name, parameter in chunk.named_parameters():
        dim = _sharded_dim(name)
        offsets = [0] * parameter.dim()
        if dim is not None:
            offsets[dim] = plan.group.rank * parameter.shape[dim]
        is_tied = plan.has_tied_head and plan.is_head_elsewhere and name in (TIED_ORIGINAL, TIED_COPY)
        found.append(
            LogicalParameter(
                name=TIED_ORIGINAL if is_tied else name,
                parameter=parameter,
                global_shape=shapes[name],
                offsets=tuple(offsets),
                is_tp_sharded=dim is not None,
                is_tied_copy=is_tied and name == TIED_COPY,
                is_tied=is_tied,
            )
        )
    return found
