"""The host waits for its device once in a step. The device is simulated by tensors on meta, which cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.comm.mesh import Mesh
from megatrain.data.step_batch import SampleSources
from megatrain.ops.to_device import to_device
from megatrain.training.rank_model import build_rank_model
from megatrain.training.step import train_step
from tests.helpers.host_waits import META, HostWaits
from tests.helpers.single_rank import SilentRecorder, make_config, random_tokens, single_rank_mesh

STEPS = 3
"""In the first step delayed scaling waits, because it has no magnitudes yet."""
OF_THE_STEP = "torch.cat(parts).tolist() (_to_copy)"
OF_ALL_RANKS = "mesh.device)).tolist() (_to_copy)"
BF16: dict[str, Any] = {"train": {"precision": "bf16"}}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
}  # fmt: skip
WIDE: dict[str, Any] = BF16 | {"model": LLAMA | {"hidden_size": 64, "seq_len": 16}}
CASES: dict[str, dict[str, Any]] = {
    "GPT, AdamW": {"model": {"dropout": 0.1}},
    "Llama, LAMB": BF16 | {"model": LLAMA, "optimizer": {"name": "lamb"}},
    "scaled embedding, Muon": {"model": {"has_scaled_embedding": True}, "optimizer": {"name": "muon"}},
    "documents, SGD": {"data": {"train": "x", "has_document_mask": True}, "optimizer": {"name": "sgd"}},
    "selective recompute": BF16 | {"parallel": {"recompute": "selective"}},
    "full recompute, ZeRO-2": BF16 | {"parallel": {"recompute": "full", "zero_stage": 2}},
    "window, offload": {"model": {"window_size": 4}, "parallel": {"offload_layers": 1}},
    "FP8, delayed": WIDE | {"fp8": {"recipe": "tensorwise", "scaling": "delayed"}},
    "FP8, by row": WIDE | {"fp8": {"recipe": "rowwise"}},
    "two sources": {
        "data": {"has_document_mask": False},
        "data_source": {"path": "x", "name": "a"},
        "data_source-2": {"path": "y", "name": "b"},
    },
}


def waits_of_a_step(tables: dict[str, Any]) -> list[str]:
    """Return where the host waits in a step of two micro-batches, after the first steps."""
    config = make_config(**tables)
    rank_model = build_rank_model(config, single_rank_mesh("meta"), SilentRecorder(), META)
    rank_model.set_training(True)
    schedule, tokens, samples = config.parallel.build_schedule(2), random_tokens(config, seed=0), torch.arange(4)
    documents = torch.zeros_like(tokens[1:]) if config.data.has_document_mask else None
    places = np.arange(4).reshape(2, 2)
    sources = SampleSources(("a", "b"), places % 2, np.ones_like(places)) if len(config.data_sources) > 1 else None
    with HostWaits() as waits:
        for _ in range(STEPS):
            waits.places.clear()
            inputs = [
                rank_model.pipeline_input(
                    tokens[:-1, part], tokens[1:, part], samples[part],
                    None if documents is None else documents[:, part].contiguous(),
                )
                for part in (slice(0, 2), slice(2, 4))
            ]  # fmt: skip
            train_step(
                rank_model, schedule, inputs, num_label_tokens=tokens[1:].numel(), lr=1e-3, grad_clip=1.0,
                recorder=SilentRecorder(), sources=sources,
            )  # fmt: skip
    return waits.places


@pytest.mark.slow(kept=["Llama, LAMB", "scaled embedding, Muon", "two sources"])
@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
def test_a_step_of_a_rank_that_is_alone_waits_once(tables: dict[str, Any]) -> None:
    (wait,) = waits_of_a_step(tables)

    assert wait.endswith(OF_THE_STEP)


def test_a_step_of_several_ranks_waits_for_their_sums_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "is_alone", False)
    first, second = waits_of_a_step({})

    assert first.endswith(OF_THE_STEP)
    assert second.endswith(OF_ALL_RANKS)


@dataclass(frozen=True)
class Tensors:
    """The inputs of a piece of work: values on the device, and memory of the host."""

    on_device: torch.Tensor
    of_host: torch.Tensor


WAITING: dict[str, Callable[[Tensors], object]] = {
    "value": lambda given: given.on_device[0].item(),
    "condition": lambda given: bool(given.on_device.sum() > 0),
    "list": lambda given: given.on_device.tolist(),
    "copy to the host": lambda given: given.on_device.cpu(),
    "read into memory of the host": lambda given: given.of_host.copy_(given.on_device),
    "copy from memory not pinned": lambda given: given.of_host.to(META, non_blocking=True),
    "copy that waits": lambda given: given.of_host.pin_memory().to(META),
    "new tensor": lambda given: torch.tensor([1.0, 2.0], device=META),
    "written from memory not pinned": lambda given: given.on_device.copy_(given.of_host, non_blocking=True),
    "list of indices": lambda given: given.on_device[[0, 1]],
}
ASYNCHRONOUS: dict[str, Callable[[Tensors], object]] = {
    "computation": lambda given: (given.on_device * 2.0 + 1.0).sum(),
    "new zeros": lambda given: torch.zeros(3, device=META),
    "filled with a number": lambda given: torch.full((3,), 4.0, device=META),
    "copy": lambda given: to_device(given.of_host, META),
    "work of the host": lambda given: given.of_host.sum().item(),
}


@pytest.mark.parametrize("work", WAITING.values(), ids=WAITING)
def test_waiting_call_is_noted(work: Callable[[Tensors], object]) -> None:
    with HostWaits() as waits:
        work(Tensors(torch.empty(4, device=META), torch.zeros(4)))

    assert len(waits.places) == 1


@pytest.mark.parametrize("work", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_call_that_does_not_wait_is_not_noted(work: Callable[[Tensors], object]) -> None:
    with HostWaits() as waits:
        work(Tensors(torch.empty(4, device=META), torch.zeros(4)))

    assert waits.places == []
