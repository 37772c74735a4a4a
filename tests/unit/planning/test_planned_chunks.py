"""The chunks of all stages are the model, divided as in the trainer, and their buckets are the trainer's."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.memory import with_changes
from megatrain.chunks.builder import build_chunks, build_meta_chunks
from megatrain.comm import create_mesh
from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.model_size import num_parameters
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import AXES, Layout
from megatrain.parallel.boxes import Box
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.offload import ImmediateCopies
from megatrain.parallel.placement import row_of
from megatrain.parallel.sequence_chunks import ChunkedSublayers
from megatrain.planning.chunks import plan_stage, planned_mesh
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import build_rank_model
from tests.helpers.single_rank import simulated_group
from tests.helpers.source_tree import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def tp_group(tp_size: int, tp_rank: int = 0) -> Group:
    return simulated_group("tp", tp_size, tp_rank)


@pytest.mark.slow(kept=["gpt_125m", "llama3_8b", "gemma3_4b"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_stages_together_are_the_model(path: Path) -> None:
    config = load_config(path).config
    layout = config.layout(None)
    total, layers = 0, []
    for stage in range(layout.pp_size):
        for chunk in build_meta_chunks(config, layout, tp_group(layout.tp_size), rank=layout.first_rank_of(stage)):
            layers += chunk.part.layers
            total += sum(
                # The other tp ranks hold the rest of it, or the same.
                math.prod(parameter.placements[0].global_shape)
                for parameter in chunk.parameters
                if parameter.placements[0].holders.index == 0
            )
            assert all(parameter.parameter.is_meta for parameter in chunk.parameters)

    assert total == num_parameters(config.model)
    assert sorted(layers) == list(range(config.model.num_layers))


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_ranks_of_every_axis_hold_each_part_alike(num_kv_heads: int) -> None:
    """Each part is on as many ranks of a stage as the axes that do not divide it have places; a tied head on two
    stages.

    Each shard is counted once: the copies that hold it have different indices.
    """
    layout = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=2, ep_size=4)
    assert all(layout.size(axis.name) > 1 for axis in AXES)
    changes = {"model.has_tied_head": True, "model.num_heads": 4, "model.num_kv_heads": num_kv_heads}
    config = Config.from_dict(with_changes({**changes, "parallel.pp_size": 2, "parallel.tp_size": 2}))
    held: dict[str, Counter[Box]] = defaultdict(Counter)
    counted: dict[str, Counter[Box]] = defaultdict(Counter)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        for chunk in build_meta_chunks(config, layout, tp_group(2, layout.index("tp", rank)), rank=rank):
            for placement in (one for logical in chunk.parameters for one in logical.placements):
                shapes[placement.name] = placement.global_shape
                held[placement.name][placement.box] += 1
                counted[placement.name][placement.box] += placement.holders.index == 0

    assert sum(map(math.prod, shapes.values())) == num_parameters(config.model)
    for name, boxes in held.items():
        assert sum(box.numel for box in boxes) == math.prod(shapes[name]), name
        # the ranks along dp and cp share the state of a part, and each of them counts its own range
        assert set(counted[name].values()) == {layout.replica_group_size}, name
        num_copies = layout.stride("pp") * (2 if name == "embedding.word.weight" else 1)
        is_cut = row_of(name, decoder_table()).cut is not None
        # With one key-value head all tp ranks hold its key and its value, in the last two places of dim 1.
        is_shared = num_kv_heads == 1 and "qkv" in name
        for box, count in boxes.items():
            is_whole = not is_cut or (is_shared and box.offsets[1] == shapes[name][1] - 2)
            assert count == (num_copies if is_whole else num_copies // layout.tp_size), name


def test_chunks_of_a_lone_stage_share_the_tied_embedding() -> None:
    tables = {"model.num_layers": 2, "parallel.num_chunks": 2, "parallel.schedule": "interleaved"}
    config = Config.from_dict(with_changes(tables))
    first, last = build_meta_chunks(config, config.layout(None), tp_group(1), rank=0)
    assert first.module.embedding is not None
    assert last.module.loss_head is not None
    assert last.module.loss_head.weight is first.module.embedding.word.weight
    parameters = (*first.parameters, *last.parameters)
    assert sum(parameter.parameter.numel() for parameter in parameters) == num_parameters(config.model)


def test_buckets_are_those_of_the_trainer() -> None:
    config = Config.from_dict(
        with_changes({"model.hidden_size": 64, "model.vocab_size": 300, "parallel.bucket_size": 20_000})
    )
    layout, recorder = Layout(), Recorder(BlackBoxWriter.anonymous())
    with planned_mesh(config, layout, 0) as mesh:
        (chunk,) = plan_stage(config, mesh)
    mesh = create_mesh(layout, 0, torch.device("cpu"), recorder)
    (built,) = build_rank_model(config, mesh, recorder, torch.device("cpu")).data_parallel

    assert [bucket.numel for bucket in chunk.buckets] == [bucket.numel for bucket in built.buckets]
    assert len(chunk.buckets) > 2
    assert all(bucket.values.is_meta for bucket in chunk.buckets)


def test_default_size_of_buckets_counts_all_replicas() -> None:
    """Each rank of the replica group has a shard of at least 65,536 elements, for any axes of the replicas."""
    config = Config.from_dict(with_changes({"parallel.bucket_size": 0, "model.hidden_size": 32}))
    found = {}
    for layout in (Layout(), Layout(dp_size=2), Layout(cp_size=2), Layout(dp_size=2, cp_size=2)):
        with planned_mesh(config, layout, 0) as mesh:
            (chunk,) = build_chunks(config, mesh, torch.device("meta"), ImmediateCopies())
        found[str(layout)] = chunk.data_parallel.options.bucket_size // mesh.replicas.size
    assert set(found.values()) == {65_536}, found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_groups_exchange_as_on_the_planned_device(device: str) -> None:
    """Along one axis or several, and among holders: with the memory of the device's library, in one recorder."""
    layout = Layout(pp_size=2, cp_size=2, dp_size=2, tp_size=4)
    config = Config.from_dict(
        with_changes(
            {
                "parallel.pp_size": 2,
                "parallel.tp_size": 4,
                "model.num_heads": 4,
                "model.num_kv_heads": 2,
                "model.has_tied_head": True,
                "runtime.device": device,
            }
        )
    )
    with planned_mesh(config, layout, 0) as mesh:
        buckets = [bucket for chunk in plan_stage(config, mesh) for bucket in chunk.buckets]
    groups = {group.name: group for one in buckets for group in (one.replicas, *one.sum_groups)}
    assert groups.keys() == {"dp-cp", "tp", "tp-in-2", "embedding"}
    for group in groups.values():
        x = torch.empty(group.size * 5, device="meta")
        with PeakTensorBytes(on_meta=True).include(x) as memory:
            pending = [group.reduce_scatter(x, Operation.GRADS_REDUCE_SCATTER) for _ in range(4)]
            in_flight = memory.live_bytes - x.nbytes - 4 * x.nbytes // group.size
        for one in pending:
            one.wait()
        # gloo's ranks exchange parts; two exchanges run at a time if the first is not awaited at once
        num_parts = 0 if device == "cuda" else 2 if group.name == "dp-cp" else 4
        assert in_flight == num_parts * x.nbytes, group.name
    recorded = mesh.recorder.complete_step().totals[Operation.GRADS_REDUCE_SCATTER]
    assert recorded.num_bytes == sum(4 * 4 * 5 * group.size for group in groups.values())


def test_every_tensor_rank_holds_the_same_amount() -> None:
    config = Config.from_dict(with_changes({"parallel.tp_size": 4}))
    held = {
        sum(
            parameter.parameter.numel()
            for chunk in build_meta_chunks(config, Layout(tp_size=4), tp_group(4, rank), rank=rank)
            for parameter in chunk.parameters
        )
        for rank in range(4)
    }

    assert len(held) == 1


def test_indivisible_model_is_refused() -> None:
    config = Config.from_dict(with_changes({}))
    config = replace(config, parallel=replace(config.parallel, tp_size=3))

    with pytest.raises(TopologyError, match=r"cannot be cut along dim 0 in 3 parts for tp_size=3"):
        build_meta_chunks(config, Layout(tp_size=3), tp_group(3), rank=0)


def test_layers_in_fp8_exchange_all_rows_at_once() -> None:
    changes = {
        "train.precision": "bf16",
        "fp8.recipe": "tensorwise",
        "fp8.skip_layers": [0, 3],
        "parallel.tp_size": 2,
        "parallel.num_sequence_chunks": 4,
        "parallel.overlap": False,
    }
    (chunk,) = build_meta_chunks(Config.from_dict(with_changes(changes)), Layout(tp_size=2), tp_group(2), rank=0)
    styles = {
        path.split(".")[1]: (module.chunks.num_chunks, module.chunks.has_overlap)
        for path, module in chunk.module.named_modules()
        if isinstance(module, ChunkedSublayers)
    }

    assert styles == dict.fromkeys(["0", "3"], (4, False))
