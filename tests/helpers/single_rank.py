"""One rank without peers: its mesh, groups that only have a name and members, and a recorder that records nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.comm.cpu_groups import CpuGroups
from megatrain.comm.group import Group
from megatrain.comm.mesh import Mesh, create_mesh
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.parallel.graphed_chunk import Capture
from megatrain.parallel.pipeline import PipelineInput, TrainingLosses
from megatrain.schedule import build_schedule
from megatrain.training.rank_model import RankModel, build_rank_model


class SilentRecorder:
    """Replaces a Recorder in tests that do not use spans."""

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        return 0

    def span(self, operation: Operation, **place: int) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, operation: Operation, **place: int) -> int:
        return 0

    def begin_now(self, token: int) -> None:
        pass

    def launched(self, token: int) -> None:
        pass

    def await_end(self, token: int) -> None:
        pass

    def end(self, token: int, has_failed: bool = False) -> None:
        pass

    def record_span(self, operation: Operation, start_ns: int, duration_ns: int, *place: int, chunk: int = -1) -> None:
        pass


def simulated_group(name: str, size: int, rank: int) -> Group:
    """Return the group as rank `rank` of `size` sees it. It has no peers: use it where no exchange is needed."""
    return Group(name, tuple(range(size)), rank)


def single_rank_groups() -> CpuGroups:
    """Return the groups of a job of one rank."""
    along = {axis: simulated_group(axis, 1, 0) for axis in Layout().grid}
    return CpuGroups(along, Layout().grid, along["dp"])


def single_rank_mesh(device: str = "cpu", *, has_wrap_links: bool = False, **along: Group) -> Mesh:
    """Return the mesh of a process without peers, except for the groups given along some axes."""
    mesh = create_mesh(Layout(), 0, torch.device(device), SilentRecorder(), has_wrap_links=has_wrap_links)
    return replace(mesh, along={**mesh.along, **along})


def make_config(**tables: dict[str, Any]) -> Config:
    """Return a tiny fp64 configuration, changed by tables as in `make_config(model={"dropout": 0.1})`."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 61,
            "seq_len": 8,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_multiple": 8,
        },
        "parallel": {"bucket_size": 500},
        "batch": {"micro_batch_size": 2, "global_batch_size": 4},
        "train": {"steps": 5, "precision": "fp64", "seed": 7},
        "optimizer": {"lr": 1e-2, "grad_clip": 0.0},
    }
    return Config.from_dict({name: defaults.get(name, {}) | tables.get(name, {}) for name in {**defaults, **tables}})


def single_rank_model(config: Config, device: str = "cpu", capture: Capture | None = None) -> RankModel:
    """Return the whole model with its initial weights, in training mode. `capture`: see build_rank_model."""
    mesh = single_rank_mesh(device, has_wrap_links=config.parallel.num_chunks > 1)
    rank_model = build_rank_model(config, mesh, SilentRecorder(), torch.device(device), capture)
    rank_model.initialize()
    rank_model.set_training(True)
    return rank_model


def random_tokens(config: Config, seed: int, num_samples: int | None = None) -> Tensor:
    """Return token ids [S + 1, B] for inputs and labels."""
    samples = config.batch.global_batch_size if num_samples is None else num_samples
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.model.vocab_size, (config.model.seq_len + 1, samples), generator=generator)


def microbatches(rank_model: RankModel, tokens: Tensor, first_sample: int = 0) -> list[PipelineInput]:
    """Divide [S + 1, B] token ids into the micro-batches of one step."""
    size = rank_model.config.batch.micro_batch_size
    return [
        rank_model.pipeline_input(
            tokens[:-1, first : first + size],
            tokens[1:, first : first + size],
            torch.arange(first_sample + first, first_sample + first + size),
            None,
        )
        for first in range(0, tokens.shape[1], size)
    ]


def add_to_losses(rank_model: RankModel, monkeypatch: pytest.MonkeyPatch, addend: Callable[[], float]) -> None:
    """Add the result of `addend` to the summed loss of each step, after its gradients exist."""
    train = rank_model.pipeline.train

    def train_and_add(*arguments: Any) -> TrainingLosses:
        losses = train(*arguments)
        return replace(losses, total=losses.total + addend())

    monkeypatch.setattr(rank_model.pipeline, "train", train_and_add)


def run_gradients(rank_model: RankModel, tokens: Tensor, first_sample: int = 0) -> float:
    """Run forward and backward of one step and return the mean loss; the gradients are in the buckets afterwards."""
    inputs = microbatches(rank_model, tokens, first_sample)
    num_labels = tokens[1:].numel()
    for chunk in rank_model.data_parallel:
        chunk.start_step()
    scale = torch.tensor(1.0 / num_labels, dtype=torch.float64, device=rank_model.device)
    schedule = build_schedule(rank_model.config.parallel.schedule, 1, 1, len(inputs))
    losses = rank_model.pipeline.train(schedule, inputs, lambda: scale)
    for chunk in rank_model.data_parallel:
        chunk.finish_reduce()
    return losses.total.item() / num_labels


def gradients_by_name(rank_model: RankModel) -> dict[str, Tensor]:
    """Return copies of the gradients in the buckets of a single rank."""
    found: dict[str, Tensor] = {}
    for chunk in rank_model.data_parallel:
        for bucket in chunk.buckets:
            shard = chunk.gradient_shard(bucket)
            for segment in bucket.segments():
                parameter = segment.logical.parameter
                found[segment.logical.name] = shard[segment.start : segment.stop].view(parameter.shape).clone()
    return found


def parameters_by_name(rank_model: RankModel) -> dict[str, Tensor]:
    """Return copies of the parameters of a single rank."""
    (chunk,) = rank_model.pipeline.chunks
    return {name: parameter.detach().clone() for name, parameter in chunk.module.named_parameters()}
