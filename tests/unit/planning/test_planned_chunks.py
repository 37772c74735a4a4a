"""The chunks of all stages are the model, cut as the trainer cuts it, and their buckets are the trainer's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.memory import with_changes
from megatrain.chunks.builder import build_meta_chunks
from megatrain.comm import create_mesh
from megatrain.comm.group import Group
from megatrain.config import load_config, num_parameters
from megatrain.config.config import Config
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import Layout
from megatrain.parallel.sequence_chunks import ChunkedSublayers
from megatrain.planning.chunks import plan_stage
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import build_rank_model
from tests.helpers.lone_rank import simulated_group
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
        for chunk in build_meta_chunks(config, layout, layout.first_rank_of(stage), tp_group(layout.tp_size)):
            layers += chunk.part.layers
            total += sum(
                # the other tp ranks hold the rest of it, or the same
                math.prod(one.placements[0].global_shape)
                for one in chunk.parameters
                if one.placements[0].holders.index == 0
            )
            assert all(one.parameter.is_meta for one in chunk.parameters)

    assert total == num_parameters(config.model)
    assert sorted(layers) == list(range(config.model.num_layers))


def test_chunks_of_a_lone_stage_share_the_tied_embedding() -> None:
    tables = {"model.num_layers": 2, "parallel.num_chunks": 2, "parallel.schedule": "interleaved"}
    config = Config.from_dict(with_changes(tables))
    first, last = build_meta_chunks(config, config.layout(None), 0, tp_group(1))
    assert first.module.embedding is not None
    assert last.module.loss_head is not None
    assert last.module.loss_head.weight is first.module.embedding.word.weight
    parameters = (*first.parameters, *last.parameters)
    assert sum(one.parameter.numel() for one in parameters) == num_parameters(config.model)


def test_buckets_are_those_of_the_trainer() -> None:
    config = Config.from_dict(
        with_changes({"model.hidden_size": 64, "model.vocab_size": 300, "parallel.bucket_size": 20_000})
    )
    layout, recorder = Layout(), Recorder(BlackBoxWriter.anonymous())
    mesh = create_mesh(layout, 0, torch.device("cpu"), recorder)
    (chunk,) = plan_stage(config, mesh)
    (built,) = build_rank_model(config, mesh, recorder, torch.device("cpu")).data_parallel

    assert [bucket.numel for bucket in chunk.buckets] == [bucket.numel for bucket in built.buckets]
    assert len(chunk.buckets) > 2
    assert all(bucket.values.is_meta for bucket in chunk.buckets)


def test_every_tensor_rank_holds_the_same_amount() -> None:
    config = Config.from_dict(with_changes({"parallel.tp_size": 4}))
    held = {
        sum(
            one.parameter.numel()
            for chunk in build_meta_chunks(config, Layout(tp_size=4), rank, tp_group(4, rank))
            for one in chunk.parameters
        )
        for rank in range(4)
    }

    assert len(held) == 1


def test_indivisible_model_is_refused() -> None:
    config = Config.from_dict(with_changes({}))
    config = replace(config, parallel=replace(config.parallel, tp_size=3))

    with pytest.raises(TopologyError, match=r"cannot be cut along dim 0 in 3 parts for tp_size=3"):
        build_meta_chunks(config, Layout(tp_size=3), 0, tp_group(3))


def test_layers_in_fp8_exchange_all_rows_at_once() -> None:
    changes = {
        "train.precision": "bf16",
        "fp8.recipe": "tensorwise",
        "fp8.skip_layers": [0, 3],
        "parallel.tp_size": 2,
        "parallel.num_sequence_chunks": 4,
        "parallel.overlap": False,
    }
    (chunk,) = build_meta_chunks(Config.from_dict(with_changes(changes)), Layout(tp_size=2), 0, tp_group(2))
    styles = {
        path.split(".")[1]: (module.chunks.num_chunks, module.chunks.has_overlap)
        for path, module in chunk.module.named_modules()
        if isinstance(module, ChunkedSublayers)
    }

    assert styles == dict.fromkeys(["0", "3"], (4, False))
