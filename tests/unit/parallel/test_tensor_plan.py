"""The tensor plan: the table covers every model, and the boxes of all ranks tile every parameter exactly once."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import AXES, Layout
from megatrain.model import ModelPart, TokenContext, Transformer
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms
from megatrain.parallel.boxes import Box
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.placement import Cut, Placement, PlacementRow, ShardHolders, row_of
from megatrain.parallel.sequence_chunks import ChunkedSublayers
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.styles import GatherSequence, ReduceScatterSequence, VocabularyCrossEntropy, VocabularyRows
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan
from tests.helpers.single_rank import simulated_group

SIZES: dict[str, Any] = {
    "vocab_size": 57, "seq_len": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4,
    "ffn_size": 12, "vocab_multiple": 4,
}  # fmt: skip
STYLES = list(
    itertools.product(
        ["serial", "parallel"],
        ["layernorm", "rmsnorm"],
        ["gelu", "swiglu"],
        [True, False],
        ["learned", "rope"],
        [True, False],
    )
)


def config_of(style: tuple[Any, ...]) -> ModelConfig:
    block, norm, mlp, has_bias, positions, has_tied_head = style
    return ModelConfig(
        **SIZES, block=block, norm=norm, mlp=mlp, has_bias=has_bias, positions=positions, has_tied_head=has_tied_head
    )


def plan_of(
    config: ModelConfig,
    tp_size: int,
    rank: int = 0,
    recompute: str = "none",
    pp_size: int = 1,
    stage: int = 0,
    loss_terms: LossTerms = CROSS_ENTROPY_ALONE,
    **sequence: Any,
) -> TensorPlan:
    return TensorPlan(
        table=decoder_table(has_two_ends=config.has_tied_head and pp_size > 1),
        layout=Layout(tp_size=tp_size, pp_size=pp_size),
        rank=stage * tp_size + rank,
        group=simulated_group("tp", tp_size, rank),
        recompute=recompute,
        vocab_size=config.vocab_size,
        loss_terms=loss_terms,
        **sequence,
    )


def planned(
    config: ModelConfig, tp_size: int, rank: int = 0, part: ModelPart | None = None, **plan: Any
) -> tuple[Transformer, list[LogicalParameter]]:
    with torch.device("meta"):
        model = Transformer(config, part)
    found, _ = apply_tensor_plan(model, plan_of(config, tp_size, rank, **plan))
    return model, found


@pytest.mark.slow(
    kept=[
        "parallel-layernorm-gelu-False-learned-False-1-4",
        "parallel-layernorm-gelu-False-rope-True-1-4",
        "parallel-layernorm-gelu-False-rope-True-2-4",
        "parallel-layernorm-gelu-True-learned-True-1-4",
        "parallel-layernorm-gelu-True-rope-False-1-4",
        "parallel-layernorm-gelu-True-rope-False-2-4",
    ]
)
@pytest.mark.parametrize(("tp_size", "num_kv_heads"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style)))
def test_boxes_of_all_ranks_tile_every_parameter(style: tuple[Any, ...], tp_size: int, num_kv_heads: int) -> None:
    config = replace(config_of(style), num_kv_heads=num_kv_heads)
    with torch.device("meta"):
        whole = {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
    ranks = [planned(config, tp_size, rank)[1] for rank in range(tp_size)]
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in whole.items()}
    for found in ranks:
        assert [one.name for one in found] == list(whole)
        for one in found:
            assert one.parameter.numel() == sum(placement.box.numel for placement in one.placements)
            for placement in one.placements:
                box = placement.box
                assert placement.global_shape == whole[one.name]
                part = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                assert counts[one.name][part].shape == box.sizes, "the box exceeds the tensor"
                assert not (counts[one.name][part] != placement.holders.index).any(), "a copy out of its turn"
                counts[one.name][part] += 1

    for placement in (placement for found in ranks for one in found for placement in one.placements):
        box, count = placement.box, counts[placement.name]
        part = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        assert (count[part] == placement.holders.count).all(), placement.name
    assert all(count.all() for count in counts.values())


def test_shapes_of_sharded_and_whole_parameters() -> None:
    _, found = planned(config_of(("serial", "layernorm", "swiglu", True, "learned", False)), 4)
    shapes = {one.name: (tuple(one.parameter.shape), not one.groups[1]) for one in found}

    branch, mlp = "blocks.1.attention_branch", "blocks.1.mlp_branch"
    assert shapes["embedding.word.weight"] == ((15, 16), True)
    assert shapes["embedding.position"] == ((8, 16), False)
    assert shapes[f"{branch}.norm.weight"] == ((16,), False)
    assert shapes[f"{branch}.attention.qkv.weight"] == ((1, 4, 2, 16), True)
    assert shapes[f"{branch}.attention.qkv.bias"] == ((1, 4, 2), True)
    assert shapes[f"{branch}.attention.out.weight"] == ((16, 4), True)
    assert shapes[f"{branch}.attention_bias"] == ((16,), False)
    assert shapes[f"{mlp}.mlp.up.weight"] == ((2, 3, 16), True)
    assert shapes[f"{mlp}.mlp.up.bias"] == ((2, 3), True)
    assert shapes[f"{mlp}.mlp.down.weight"] == ((16, 3), True)
    assert shapes["loss_head.weight"] == ((15, 16), True)


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_tensor_plan_replaces_the_named_submodules(block: str) -> None:
    model, _ = planned(config_of((block, "layernorm", "gelu", True, "learned", True)), 2, rank=1)
    kinds = Counter(type(module).__name__ for module in model.modules())
    branches = 2 * (2 if block == "serial" else 1)

    assert kinds[GatherSequence.__name__] == branches + 1
    assert kinds[ReduceScatterSequence.__name__] == branches + 1
    assert kinds[nn.Identity.__name__] == 0
    assert model.embedding is not None
    assert model.loss_head is not None
    assert isinstance(model.embedding.word, VocabularyRows)
    assert isinstance(model.loss_head.cross_entropy, VocabularyCrossEntropy)
    assert model.embedding.word.first == model.loss_head.cross_entropy.first_column == 30
    assert model.embedding.word.weight is model.loss_head.weight


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_chunked_branches_replace_both_submodules(block: str) -> None:
    config = config_of((block, "layernorm", "gelu", True, "learned", True))
    model, found = planned(config, 2, recompute="full", num_sequence_chunks=4, has_overlap=False)
    whole = planned(config, 2)[1]
    styles = chunked(model)

    assert len(styles) == 2 * (2 if block == "serial" else 1)
    assert {(style.chunks.num_chunks, style.chunks.has_overlap) for style in styles} == {(4, False)}
    assert all(style.keeps_rows for style in styles)
    # Embedding and head exchange all rows at once.
    kinds = Counter(type(module).__name__ for module in model.modules())
    assert kinds[GatherSequence.__name__] == kinds[ReduceScatterSequence.__name__] == 1
    assert [one.name for one in found] == [one.name for one in whole]
    assert not any(style.keeps_rows for style in chunked(planned(config, 2, num_sequence_chunks=4)[0]))


def test_layers_with_products_of_their_own_stay_whole() -> None:
    config = config_of(STYLES[0])
    model, _ = planned(config, 2, num_sequence_chunks=4, whole_layers={0})

    assert not chunked(model.blocks["0"])
    assert len(chunked(model.blocks["1"])) == 2
    assert sum(isinstance(module, GatherSequence) for module in model.blocks["0"].modules()) == 2


def chunked(model: nn.Module) -> list[ChunkedSublayers]:
    return [module for module in model.modules() if isinstance(module, ChunkedSublayers)]


def test_vocabulary_parallel_loss_adds_terms_in_training_only() -> None:
    terms = LossTerms(z_loss=0.01, label_smoothing=0.2)
    model, _ = planned(config_of(STYLES[0]), 2, loss_terms=terms)
    assert model.loss_head is not None
    style = model.loss_head.cross_entropy
    logits, labels = torch.randn(5, 30, dtype=torch.float64), torch.arange(5)

    # Each of two ranks has half of the vocabulary; a simulated group computes only the sums of this rank.
    style.vocab_size = 30
    smoothed = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.2)
    added = 0.01 * torch.logsumexp(logits, -1).square().sum()
    torch.testing.assert_close(style(logits.clone(), labels), smoothed + added, rtol=1e-12, atol=0)
    style.eval()
    plain = functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(style(logits.clone(), labels), plain, rtol=1e-12, atol=0)


def test_plan_for_tp_1_keeps_the_plain_model() -> None:
    model, _ = planned(config_of(("serial", "layernorm", "gelu", True, "learned", True)), 1)
    kinds = {type(module).__name__ for module in model.modules()}

    assert not kinds & {"GatherSequence", "ReduceScatterSequence", "VocabularyRows", "VocabularyCrossEntropy"}


def test_tied_head_on_another_stage_is_a_copy_of_the_embedding() -> None:
    config = config_of(("serial", "layernorm", "gelu", True, "learned", True))
    first = planned(config, 2, 1, ModelPart(range(1), has_embedding=True, has_head=False), pp_size=2)[1]
    last = planned(config, 2, 1, ModelPart(range(1, 2), has_embedding=False, has_head=True), pp_size=2, stage=1)[1]

    for index, part in enumerate((first, last)):
        (one,) = (one for one in part if one.groups[1] == ("embedding",))
        box, holders = Box((30, 0), (30, 16)), ShardHolders(("embedding",), index, 2)
        assert one.placements == (Placement("embedding.word.weight", (60, 16), box, "dp", holders),)
        assert one.parameter.shape == (30, 16)
    assert not any(one.name == "loss_head.weight" for one in last)


def test_untied_head_on_another_stage_is_a_parameter_of_its_own() -> None:
    config = config_of(("serial", "layernorm", "gelu", True, "learned", False))
    last = planned(config, 2, 0, ModelPart(range(1, 2), has_embedding=False, has_head=True), pp_size=2)[1]

    assert "loss_head.weight" in {one.name for one in last}
    assert not any("embedding" in one.groups[1] for one in last)


@pytest.mark.slow
def test_only_matrices_and_embeddings_are_decayed() -> None:
    for style in STYLES:
        for one in planned(config_of(style), 2)[1]:
            is_matrix = len(one.placements[0].global_shape) > 1 and "bias" not in one.name
            assert one.is_decayed == is_matrix, one.name


def test_unknown_parameter_is_refused() -> None:
    config = config_of(STYLES[0])
    with torch.device("meta"):
        model = Transformer(config)
        model.blocks["1"].gate = nn.Parameter(torch.empty(3))

    with pytest.raises(TopologyError, match=r"blocks\.1\.gate .*placement table"):
        apply_tensor_plan(model, plan_of(config, 2))


def test_unknown_parameter_at_the_root_is_named_without_a_dot() -> None:
    model = nn.Linear(2, 2, device="meta")

    with pytest.raises(TopologyError, match="parameter weight matches no row"):
        apply_tensor_plan(model, plan_of(config_of(STYLES[0]), 1))


@pytest.mark.parametrize(
    ("tp_size", "problem"),
    [
        (3, "(embedding.word.weight|qkv).*tp_size=3"),
        (16, "qkv.weight: 4 ranks of a group of tp-in-4 split q"),
    ],
)
def test_dim_that_does_not_divide_is_refused(tp_size: int, problem: str) -> None:
    config = ModelConfig(**SIZES | {"vocab_multiple": 16, "ffn_size": 24})

    with pytest.raises(TopologyError, match=problem):
        planned(config, tp_size)


def test_meta_model_is_never_given_memory_by_the_plan() -> None:
    model, _ = planned(config_of(STYLES[0]), 2)

    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_vocabulary_rows_give_own_rows_and_zeros(rank: int) -> None:
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 11], [3, 2], [9, 3], [5, 8]])
    weight = nn.Parameter(table[3 * rank : 3 * rank + 3].clone())
    out = VocabularyRows(weight, 3 * rank)(tokens)
    out.sum().backward()

    is_own = (tokens >= 3 * rank) & (tokens < 3 * rank + 3)
    assert torch.equal(out.detach(), table[tokens] * is_own[..., None])
    expected = torch.zeros(3, 5)
    for token in tokens[is_own].tolist():
        expected[token - 3 * rank] += 1
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_planned_model_of_one_rank_equals_the_plain_model() -> None:
    config = config_of(("parallel", "rmsnorm", "swiglu", False, "rope", True))
    tokens = torch.randint(0, 57, (9, 2), generator=torch.Generator().manual_seed(0))
    context = TokenContext(torch.arange(2), 8)

    def loss_of(recompute: str | None) -> Tensor:
        model = Transformer(config).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        if recompute is None:
            return model(tokens[:-1], context, tokens[1:])
        state = model.state_dict()
        _, selective_recompute = apply_tensor_plan(model, plan_of(config, 1, recompute=recompute))
        model.load_state_dict(state)
        with selective_recompute:
            return model(tokens[:-1], context, tokens[1:])

    assert torch.equal(loss_of(None), loss_of("none"))
    assert torch.equal(loss_of(None), loss_of("selective"))


EVERY_AXIS = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=4)
OVER_EP = PlacementRow("blocks.*.mlp.up.weight", Cut("ep", 1), replica_axes=("edp",), is_hidden_weight=True)


def test_part_of_a_rank_follows_from_its_whole_coordinate() -> None:
    """With each axis above 1: a part is on as many ranks as the axes that do not divide it have places.

    Each rank knows all parts of a hidden weight: those of the ranks along the axis that divides it.
    """
    assert all(EVERY_AXIS.size(axis.name) > 1 for axis in AXES)
    config = replace(config_of(STYLES[0]), num_kv_heads=4)
    found: dict[str, Counter[Box]] = defaultdict(Counter)
    for rank in range(EVERY_AXIS.world_size):
        with torch.device("meta"):
            model = Transformer(config)
        plan = replace(
            plan_of(config, tp_size=2, rank=rank % 2), layout=EVERY_AXIS, rank=rank, table=(OVER_EP, *decoder_table())
        )
        place = {axis: EVERY_AXIS.index(axis, rank) for axis in ("tp", "ep")}
        for one in apply_tensor_plan(model, plan)[0]:
            for placement in one.placements:
                found[one.name][placement.box] += 1
            if one.hidden is not None:
                assert one.hidden.boxes[place[one.hidden.axis]] == tuple(each.box for each in one.placements)
                parts = {box for of_part in one.hidden.boxes for box in of_part}
                assert sum(box.numel for box in parts) == math.prod(one.placements[0].global_shape), one.name
    for name, boxes in found.items():
        cut = row_of(name, (OVER_EP, *decoder_table())).cut
        num_parts = 1 if cut is None else EVERY_AXIS.size(cut.axis)
        assert len(boxes) == num_parts, name
        assert set(boxes.values()) == {EVERY_AXIS.world_size // num_parts}, name
