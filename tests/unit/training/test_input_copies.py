"""Micro-batches are copied to a GPU on a separate stream, beside its other work, and are complete before they are used.

Numbers: copies here are made at the last moment that the streams of a GPU would allow; tensors are -1 until then.
Order: torch.cuda's streams are simulated, so the time of each copy is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.chunks import inputs as inputs_module
from megatrain.chunks.inputs import InputCopies
from megatrain.comm.device_stream import NoStream
from megatrain.model import PatchRows
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import ChunkPlacement, forward_only
from megatrain.training.rank_model import RankModel
from megatrain.training.step import train_step
from tests.helpers.simulated_device import DeviceWork, SimulatedEvent, SimulatedStream, Simulation
from tests.helpers.single_rank import SilentRecorder, make_config, random_tokens, single_rank_model

WRONG = -1
PICTURES: dict[str, Any] = {"picture_size": 4, "patch_size": 2, "encoder_num_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "dropout": {"model": {"dropout": 0.2}},
    "documents": {"data": {"train": "x", "has_document_mask": True}, "parallel": {"schedule": "gpipe"}},
    "pictures": {"model": PICTURES},
    "full recompute": {"parallel": {"recompute": "full"}},
}


class LateCopies(InputCopies):
    """Copies when a copy is awaited and not before, from memory that the caller cannot change."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), NoStream(is_urgent=False))
        self._pinned: list[tuple[Tensor, Tensor]] = []
        self.num_copied = 0

    def start(self, x: Tensor) -> Tensor:
        copy = torch.full_like(x, 255 if x.dtype == torch.uint8 else WRONG)
        self._pinned.append((copy, x.clone()))
        return copy

    def awaiting(self, copies: Sequence[Tensor]) -> Callable[[], None]:
        pinned, self._pinned = self._pinned, []
        assert [id(copy) for copy, _ in pinned] == list(map(id, copies))

        def copy_now() -> None:
            for copy, source in pinned:
                copy.copy_(source)
            self.num_copied += len(pinned)
            pinned.clear()

        return copy_now


@dataclass
class HostMemory:
    """The micro-batches of a step in memory of the host."""

    tensors: list[Tensor]

    def new(self, x: Tensor) -> Tensor:
        self.tensors.append(x.clone())
        return self.tensors[-1]

    def overwrite(self) -> None:
        """Store other values, as the reader of the next step does."""
        for x in self.tensors:
            x.fill_(3)


def inputs_of(rank_model: RankModel, host: HostMemory, seed: int) -> list[PipelineInput]:
    """Return the inputs of a step of two micro-batches of two samples."""
    config = rank_model.config
    tokens = random_tokens(config, seed)
    documents = torch.arange(config.model.seq_len)[:, None].expand(-1, 2) // 3
    patches = torch.arange(4 * 12).reshape(4, 1, 12).to(torch.uint8)
    return [
        rank_model.pipeline_input(
            host.new(tokens[:-1, part]),
            host.new(tokens[1:, part]),
            host.new(torch.arange(4)[part] + 10 * seed),
            host.new(documents) if config.data.has_document_mask else None,
            PatchRows(host.new(patches), host.new(torch.tensor([1]))) if config.model.has_pictures else None,
        )
        for part in (slice(0, 2), slice(2, 4))
    ]


def numbers(tables: dict[str, Any], copies: InputCopies | None) -> list[float]:
    """Return the losses and norms of two steps, and the loss of an evaluation."""
    config = make_config(**tables)
    rank_model = single_rank_model(config)
    if copies is not None:
        rank_model = replace(rank_model, input_copies=copies)
    found, host = list[float](), HostMemory([])
    for step in range(2):
        inputs = inputs_of(rank_model, host, step)
        if copies is not None:
            host.overwrite()
        outcome = train_step(
            rank_model, config.parallel.build_schedule(2), inputs, num_label_tokens=32, lr=1e-2, grad_clip=1.0,
            recorder=SilentRecorder(),
        )  # fmt: skip
        found += [outcome.loss, outcome.grad_norm]
    rank_model.set_training(False)
    evaluated = rank_model.pipeline.evaluate(forward_only(ChunkPlacement(1, 1), 2), inputs_of(rank_model, host, 2))
    return [*found, evaluated.item()]


@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
def test_late_copies_change_no_bit(tables: dict[str, Any]) -> None:
    late = LateCopies()
    assert numbers(tables, late) == numbers(tables, None)
    assert late.num_copied >= 3 * 2 * 3, "of three tensors of two micro-batches in three passes"


def test_on_a_cpu_tensors_are_used_as_they_are() -> None:
    rank_model = single_rank_model(make_config())
    host = HostMemory([])
    (first, _) = inputs_of(rank_model, host, seed=0)
    assert first.tokens_SB is host.tensors[0]
    assert first.labels_SB is host.tensors[1]


class SimulatedCuda:
    """torch.cuda's streams on a simulated GPU. handed_over: tensors, and the streams that may use them."""

    def __init__(self) -> None:
        self.simulation = Simulation(1)
        (self.gpu,) = self.simulation.devices
        self.compute = self.gpu.current
        self.copies: list[DeviceWork] = []
        self.handed_over: list[tuple[Tensor, SimulatedStream]] = []
        self.copy_ns = 3.0

    def copy(self, x: Tensor, device: torch.device) -> Tensor:
        self.copies.append(self.gpu.launch("copy", self.copy_ns))
        return x.clone()

    def new_stream(self, **options: Any) -> CudaLikeStream:
        return CudaLikeStream(self.gpu.new_stream(is_urgent=bool(options.get("priority"))))

    @contextmanager
    def stream(self, stream: CudaLikeStream) -> Iterator[None]:
        before, self.gpu.current = self.gpu.current, stream.simulated
        try:
            yield
        finally:
            self.gpu.current = before

    def current_stream(self) -> CudaLikeStream:
        return CudaLikeStream(self.gpu.current)


@dataclass
class CudaLikeStream:
    """A simulated stream as torch.cuda.Stream."""

    simulated: SimulatedStream

    def record_event(self) -> SimulatedEvent:
        return self.simulated.mark()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    simulated = SimulatedCuda()
    monkeypatch.setattr(torch.cuda, "Stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", simulated.current_stream)
    monkeypatch.setattr(inputs_module, "to_device", simulated.copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: simulated.handed_over.append((x, stream.simulated)))
    return simulated


@pytest.mark.parametrize(("copy_ns", "forward_at_ns"), [(3.0, 20.0), (9.0, 27.0)], ids=["short", "long"])
def test_copies_run_beside_the_update_and_before_the_forward(
    cuda: SimulatedCuda, copy_ns: float, forward_at_ns: float
) -> None:
    cuda.copy_ns = copy_ns
    copies = InputCopies.to(torch.device("cuda"))
    update = cuda.gpu.launch("update of the parameters", 20.0)
    started = [copies.start(torch.zeros(2)) for _ in range(3)]
    await_copies = copies.awaiting(started)
    copies.awaiting([copies.start(torch.zeros(2))])  # of the next micro-batch
    await_copies()
    forward = cuda.gpu.launch("forward", 5.0)
    cuda.simulation.run()

    assert [one.begin_ns for one in cuda.copies] == [0.0, copy_ns, 2 * copy_ns, 3 * copy_ns]
    assert forward.begin_ns == forward_at_ns == max(update.end_ns, cuda.copies[2].end_ns)


def test_memory_of_copies_waits_for_the_work_that_uses_them(cuda: SimulatedCuda) -> None:
    copies = InputCopies.to(torch.device("cuda"))
    started = [copies.start(torch.zeros(2)) for _ in range(2)]
    await_copies = copies.awaiting(started)
    assert cuda.handed_over == []
    await_copies()
    assert [(id(x), stream) for x, stream in cuda.handed_over] == [(id(x), cuda.compute) for x in started]
