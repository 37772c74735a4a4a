"""One stage of a pipeline between simulated neighbors: what it sends, when it frees it, and what it keeps.

The stage's model is one scaled tensor, and its links and buckets only record calls: the test is about order and memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.comm.exchange import Pending
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.parallel.deferred_wgrads import Wgrads
from megatrain.parallel.pipeline import Pipeline, PipelineChunk, PipelineInput
from megatrain.schedule import ActionKind, ChunkPlacement, Schedule, build_schedule, forward_only

SHAPE = (4, 2, 3)
"""Rows, micro-batch, hidden."""
COUNT = 3
"""Micro-batches."""


class Token:
    """Lives as long as the graph that holds it."""


class ScaleModule(torch.autograd.Function):
    """x * weight, or its sum for the loss; the node holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token: Token, is_loss: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.token = token
        # as a real chunk may be: not contiguous
        return (x * weight).sum() if is_loss else (x * weight).transpose(0, 2).contiguous().transpose(0, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return gradient.expand(x.shape) * weight, (gradient * x).sum(), None, None


class Module(nn.Module):
    """The model part of one chunk. Records whether a gradient is required, and how many graphs are alive."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.losses = list(losses)
        self.tokens: list[weakref.ref[Token]] = []
        self.num_alive: list[int] = []
        self.is_grad_enabled: list[bool] = []

    def forward(self, x: Tensor, context: object, labels_SB: Tensor | None) -> Tensor:
        self.is_grad_enabled.append(torch.is_grad_enabled())
        self.num_alive.append(sum(one() is not None for one in self.tokens))
        token = Token()
        self.tokens.append(weakref.ref(token))
        if x.dtype == torch.int64:
            x = x[:, :, None].expand(SHAPE).float()
        out = ScaleModule.apply(x, self.weight, token, labels_SB is not None)
        return out * 0.0 + self.losses.pop(0) if self.losses else out


class Buckets:
    """Replaces a chunk's ChunkDataParallel and records its calls."""

    def __init__(self, log: list[str], chunk: int) -> None:
        self._log = log
        self._chunk = chunk
        self.wgrads = Wgrads()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._log.append(f"{name} {self._chunk}")


class StageLink:
    """A channel whose messages are delivered at once or only when waited for."""

    def __init__(self, log: list[str], is_fast: bool) -> None:
        self._log = log
        self._is_fast = is_fast
        self.sent: list[Tensor] = []
        self.num_alive: list[int] = []
        self._storages: list[StorageWeakRef] = []

    def send(self, x: Tensor, operation: Operation, *, chunk: int, microbatch: int) -> Pending:
        what = f"{operation.value} {chunk}.{microbatch}"
        self._log.append(what)
        assert not x.requires_grad
        assert x.is_contiguous()
        self.num_alive.append(sum(not storage.expired() for storage in self._storages))
        self._storages.append(StorageWeakRef(x.untyped_storage()))
        self.sent.append(x.clone())
        return Pending(x, lambda: self._log.append(f"{what} ended"), lambda: self._is_fast)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, operation: Operation, *,
                chunk: int, microbatch: int) -> Pending:  # fmt: skip
        return Pending(torch.full(shape, microbatch + 1.0, dtype=dtype))


class NotingRecorder:
    """Records the spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[Operation, int, int]] = []

    def span(self, operation: Operation, *, microbatch: int, chunk: int) -> AbstractContextManager[None]:
        self.spans.append((operation, microbatch, chunk))
        return nullcontext()


class StageUnderTest:
    """A pipeline whose environment records calls in `log`."""

    def __init__(
        self, stage: int, pp_size: int = 2, num_chunks: int = 1, *, is_fast: bool = True, losses: Sequence[float] = ()
    ) -> None:
        self.log: list[str] = []
        names = ("forward_to_next", "forward_from_previous", "backward_to_previous", "backward_from_next")
        self.links = SimpleNamespace(**{name: StageLink(self.log, is_fast) for name in names})
        self.recorder = NotingRecorder()
        self.modules = [Module(losses) for _ in range(num_chunks)]
        chunks = [PipelineChunk(module, nullcontext(), Buckets(self.log, chunk))  # type: ignore[arg-type]
                  for chunk, module in enumerate(self.modules)]  # fmt: skip
        mesh: Any = SimpleNamespace(layout=Layout(pp_size=pp_size), stage=stage, links=self.links)
        recorder: Any = self.recorder
        cpu = torch.device("cpu")
        self.pipeline = Pipeline(mesh, chunks, recorder, hidden_size=SHAPE[2], dtype=torch.float32, device=cpu)

    def train(self, schedule: Schedule) -> Tensor:
        return self.pipeline.train(schedule, inputs(schedule.num_microbatches), lambda: torch.tensor(1.0)).total

    def wanted(self, *prefixes: str) -> list[str]:
        """Return the notes that begin with one of the prefixes."""
        return [note for note in self.log if note.startswith(prefixes)]


def inputs(count: int) -> list[PipelineInput]:
    tokens_SB = torch.arange(8).view(4, 2)
    return [PipelineInput(tokens_SB + microbatch, tokens_SB, None) for microbatch in range(count)]


def test_sent_tensor_is_freed_before_the_next_action() -> None:
    stage = StageUnderTest(0)
    stage.train(build_schedule("gpipe", 2, 1, COUNT))

    sends = [f"forward-send 0.{microbatch}" for microbatch in range(COUNT)]
    assert stage.wanted("forward-send") == [note for send in sends for note in (send, f"{send} ended")]
    assert stage.log.index("forward-send 0.0 ended") == stage.log.index("forward-send 0.0") + 1
    assert stage.links.forward_to_next.num_alive == [0] * COUNT
    # in the order of the backwards, too
    last = StageUnderTest(1)
    last.train(build_schedule("gpipe", 2, 1, COUNT))
    order = [note.removesuffix(" ended") for note in last.wanted("backward-send")]
    assert order[::2] == order[1::2]
    assert sorted(order[::2]) == [f"backward-send 0.{microbatch}" for microbatch in range(COUNT)]


def test_pending_messages_are_kept_and_awaited_at_the_end() -> None:
    first, last = StageUnderTest(0, is_fast=False), StageUnderTest(1, is_fast=False)
    for stage in (first, last):
        stage.train(build_schedule("gpipe", 2, 1, COUNT))

    sends = [f"forward-send 0.{microbatch}" for microbatch in range(COUNT)]
    assert first.wanted("forward-send")[:COUNT] == sends
    assert first.links.forward_to_next.num_alive == list(range(COUNT))
    for stage in (first, last):
        assert all(note.endswith(" ended") for note in stage.log[-COUNT:])
        assert not any(note.endswith(" ended") for note in stage.log[:-COUNT])


def test_a_message_is_whole_contiguous_and_without_a_graph() -> None:
    first, last = StageUnderTest(0), StageUnderTest(1)
    for stage in (first, last):
        stage.train(build_schedule("1f1b", 2, 1, COUNT))

    # The link itself checks that they are contiguous and require no gradient.
    for microbatch, sent in enumerate(first.links.forward_to_next.sent):
        expected = 2.0 * (torch.arange(8).view(4, 2) + microbatch)[:, :, None].expand(SHAPE)
        assert torch.equal(sent, expected)
    assert [sent.tolist() for sent in last.links.backward_to_previous.sent] == [torch.full(SHAPE, 2.0).tolist()] * COUNT
    # Every received gradient is micro-batch + 1 everywhere, as is every received input.
    tokens = torch.tensor([float((torch.arange(8) + microbatch).sum()) * 3 for microbatch in range(COUNT)])
    assert first.modules[0].weight.grad == (tokens * (torch.arange(COUNT) + 1)).sum()
    assert last.modules[0].weight.grad == 24 * (1 + 2 + 3)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_graph_dies_with_its_backward(num_microbatches: int) -> None:
    stage = StageUnderTest(0, pp_size=1)
    stage.train(build_schedule("1f1b", 1, 1, num_microbatches))

    (module,) = stage.modules
    assert module.num_alive == [0] * num_microbatches
    assert all(token() is None for token in module.tokens)


def test_an_evaluation_makes_no_graph() -> None:
    for stage in (StageUnderTest(0), StageUnderTest(1)):
        total = stage.pipeline.evaluate(forward_only(ChunkPlacement(2, 1), COUNT), inputs(COUNT))

        (module,) = stage.modules
        assert module.is_grad_enabled == [False] * COUNT
        assert not total.requires_grad
        assert stage.wanted("backward") == []
        # Parameters may still be in flight when it begins.
        assert stage.wanted("await_parameters") == ["await_parameters 0"] * COUNT
    assert torch.is_grad_enabled()


def test_losses_are_summed_in_double_from_the_first() -> None:
    tiny = 2.0**-40
    stage = StageUnderTest(0, pp_size=1, losses=[1.0, tiny, tiny])
    total = stage.train(build_schedule("1f1b", 1, 1, 3))

    assert total.dtype == torch.float64
    assert total.item() == 1.0 + 2 * tiny


@pytest.mark.parametrize("stage_number", [0, 1])
def test_all_gathers_end_before_gradients_take_memory(stage_number: int) -> None:
    stage = StageUnderTest(stage_number, num_chunks=2)
    schedule = build_schedule("interleaved", 2, 2, 4)
    stage.train(schedule)

    calls = ("finish_earlier_reductions", "before_backward", "after_backward", "reduce")
    order = [note for note in stage.log if note.split()[0] in calls]
    backwards = [span[2] for span in stage.recorder.spans if span[0] is Operation.BACKWARD_COMPUTE]
    expected: list[str] = []
    for position, chunk in enumerate(backwards):
        expected += ["finish_earlier_reductions 0", "finish_earlier_reductions 1"]
        expected += [f"before_backward {chunk}", f"after_backward {chunk}"]
        if chunk not in backwards[position + 1 :]:
            expected.append(f"reduce {chunk}")
    assert order == expected


def test_every_compute_is_a_span_of_its_own() -> None:
    stage = StageUnderTest(1, num_chunks=2)
    stage.train(build_schedule("interleaved", 2, 2, 4))

    for operation in (Operation.FORWARD_COMPUTE, Operation.BACKWARD_COMPUTE):
        found = [span[1:] for span in stage.recorder.spans if span[0] is operation]
        assert sorted(found) == [(microbatch, chunk) for microbatch in range(4) for chunk in range(2)]


@pytest.mark.parametrize("stage_number", [0, 1])
def test_deferred_wgrad_runs_where_the_schedule_has_it(stage_number: int) -> None:
    stage = StageUnderTest(stage_number)
    (chunk,), (module,) = stage.pipeline.chunks, stage.modules
    module.weight.register_hook(
        # As an operation that leaves its product to the main_grad, with the state of its backward.
        lambda gradient: chunk.data_parallel.wgrads.run(lambda: stage.log.append(f"product {gradient:g}"))
    )
    schedule = build_schedule("zero_bubble", 2, 1, COUNT)
    whole = StageUnderTest(stage_number)
    for one in (stage, whole):
        one.train(schedule if one is stage else build_schedule("1f1b", 2, 1, COUNT))

    operations = {
        ActionKind.FORWARD: Operation.FORWARD_COMPUTE,
        ActionKind.DGRAD: Operation.BACKWARD_COMPUTE,
        ActionKind.WGRAD: Operation.BACKWARD_WEIGHT_COMPUTE,
    }
    computes = [action for action in schedule.stages[stage_number] if action.kind in operations]
    assert stage.recorder.spans == [
        (operations[compute.kind], compute.microbatch, compute.chunk) for compute in computes
    ]
    products = stage.wanted("product")
    assert len(products) == COUNT
    assert stage.log.index(products[-1]) < stage.log.index("reduce 0")
    if stage_number == 1:
        # The gradient is sent before the deferred wgrad: here, another two backwards later.
        gone = [stage.log.index(f"backward-send 0.{microbatch}") for microbatch in range(COUNT)]
        made = [stage.log.index(product) for product in products]
        assert gone[0] < gone[1] < made[0] < gone[2] < made[1]
    assert module.weight.grad == whole.modules[0].weight.grad
