"""The operations that captured graphs refuse, and how CUDA graphs are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatrain.model import TokenContext
from megatrain.ops.documents import pack_documents
from megatrain.parallel.graphed_chunk import CudaGraphCapture
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import build_schedule
from megatrain.training.rank_model import RankModel, capture_of
from tests.helpers.replayed_operations import ReplayedOperations
from tests.helpers.single_rank import (
    make_config,
    microbatches,
    random_tokens,
    run_gradients,
    single_rank_model,
)


@pytest.fixture
def recorded() -> RankModel:
    """A rank model whose first micro-batch was recorded."""
    rank_model = single_rank_model(
        make_config(batch={"micro_batch_size": 2, "global_batch_size": 2}), capture=ReplayedOperations()
    )
    for _ in range(3):
        run_gradients(rank_model, random_tokens(rank_model.config, seed=0))
    return rank_model


def train(rank_model: RankModel, inputs: list[PipelineInput], schedule: str = "1f1b") -> None:
    for chunk in rank_model.data_parallel:
        chunk.start_step()
    scale = torch.ones((), dtype=torch.float64)
    rank_model.pipeline.train(build_schedule(schedule, 1, 1, len(inputs)), inputs, lambda: scale)


def with_context(pipeline_input: PipelineInput, **changes: Any) -> PipelineInput:
    return replace(pipeline_input, context=replace(pipeline_input.context, **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: replace(one, tokens_SB=one.tokens_SB[:, :1]), r"x must be \[8, 2\] of torch.int64 .* \[8, 1\]"),
        (lambda one: replace(one, labels_SB=one.labels_SB[:1]), r"labels_SB must be \[8, 2\] .*, got \[1, 2\]"),
        (lambda one: replace(one, labels_SB=one.labels_SB.int()), r"labels_SB must be .*, got \[8, 2\] of torch.int32"),
        (lambda one: with_context(one, seq_len=16), r"2 samples, seq_len=8, token_offset=0 cannot .* seq_len=16"),
        (lambda one: with_context(one, sample_B=torch.zeros(1)), r"cannot copy a context of 1 sample,"),
        (
            lambda one: with_context(one, documents=pack_documents(one.tokens_SB)),
            r"cannot copy a context of 2 samples, seq_len=8, token_offset=0, documents",
        ),
    ],
)  # fmt: skip
def test_another_form_of_microbatch_is_refused(
    recorded: RankModel, change: Callable[[PipelineInput], PipelineInput], message: str
) -> None:
    (one,) = microbatches(recorded, random_tokens(recorded.config, seed=0))

    with pytest.raises(ValueError, match=message):
        train(recorded, [change(one)])


def test_documents_are_not_recorded() -> None:
    context = TokenContext(torch.zeros(2), 8, pack_documents(torch.zeros(8, 2)))

    with pytest.raises(
        ValueError,
        match=r"cannot be cloned, because their bounds differ between micro-batches; use data\.has_document_mask=false",
    ):
        context.clone()


def test_a_forward_before_the_last_backward_is_refused(recorded: RankModel) -> None:
    """As in gpipe: the second forward would overwrite tensors that the first backward needs."""
    inputs = 2 * microbatches(recorded, random_tokens(recorded.config, seed=0))

    with pytest.raises(RuntimeError, match="ran before the backward of the last one"):
        train(recorded, inputs, "gpipe")


def test_stand_in_refuses_work_that_waits_for_the_device() -> None:
    """The stand-in refuses what CUDA would refuse: otherwise these tests would prove less."""
    for work in (lambda: torch.ones(3).sum().item(), lambda: torch.ones(3).nonzero(), lambda: torch.tensor([1.0])):
        with pytest.raises(RuntimeError, match="waits for the device"):
            ReplayedOperations().capture(work)


def test_stand_in_replays_work_and_records_without_effect() -> None:
    """The contract of the stand-in: earlier memory is restored, and Python runs once."""
    total, seen = torch.ones(3), []

    def work() -> None:
        seen.append(0)
        total.add_((total * 2).sum())

    replay = ReplayedOperations().capture(work)
    assert total.tolist() == [1.0, 1.0, 1.0]
    for expected in (7.0, 49.0):
        replay()
        assert total.tolist() == [expected] * 3
    assert len(seen) == 1


def test_graphed_chunk_frees_gradient_accumulation_nodes() -> None:
    """They belong to the stream on which they were created: a capture must create its own, on its own stream."""
    rank_model = single_rank_model(make_config())
    (chunk,) = rank_model.pipeline.chunks
    parameters = list(chunk.module.parameters())
    used = [get_gradient_edge(parameter).node for parameter in parameters]
    for node in used:
        node.metadata["is_used"] = True
    run_gradients(rank_model, random_tokens(rank_model.config, seed=0))
    assert all("is_used" in get_gradient_edge(parameter).node.metadata for parameter in parameters)
    del used, node

    assert not any("is_used" in get_gradient_edge(parameter).node.metadata for parameter in parameters)


def test_only_a_gpu_with_cuda_graphs_enabled_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.training.rank_model.CudaGraphCapture", ReplayedOperations)
    for is_wanted in (False, True):
        config = make_config(kernels={"cuda_graphs": is_wanted})
        captures = {device: capture_of(config, torch.device(device)) for device in ("cpu", "meta", "cuda")}
        assert [device for device, capture in captures.items() if capture is not None] == (
            ["cuda"] if is_wanted else []
        )


def test_a_rank_model_records_with_what_its_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = {True: ReplayedOperations(), False: None}
    monkeypatch.setattr(
        "megatrain.training.rank_model.capture_of", lambda config, device: captures[config.kernels.cuda_graphs]
    )
    for is_wanted, capture in captures.items():
        rank_model = single_rank_model(
            make_config(kernels={"cuda_graphs": is_wanted}, batch={"micro_batch_size": 2, "global_batch_size": 2})
        )
        for _ in range(4):
            run_gradients(rank_model, random_tokens(rank_model.config, seed=0))
        assert capture is None or capture.num_replays == [2, 2]


class _FakeGraph:
    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_cuda_graphs_share_one_pool_and_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    @contextmanager
    def graph(made: Any, **options: Any) -> Iterator[None]:
        calls.append((made, options))
        yield

    fake = SimpleNamespace(graph_pool_handle=object, Stream=object, CUDAGraph=_FakeGraph, graph=graph)
    monkeypatch.setattr("megatrain.parallel.graphed_chunk.torch", SimpleNamespace(cuda=fake))
    capture, ran = CudaGraphCapture(), []
    replays = [capture.capture(lambda: ran.append(0)) for _ in range(2)]
    replays[1]()

    assert len(ran) == 2
    assert calls[0][1] == calls[1][1]
    assert calls[0][1].keys() == {"pool", "stream", "capture_error_mode"}
    assert calls[0][1]["capture_error_mode"] == "thread_local"
    assert [made.num_replays for made, _ in calls] == [0, 1]

    def wait() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    problem = r"kernels\.cuda_graphs: a micro-batch could not be captured: operation not permitted.*cuda_graphs=false"
    with pytest.raises(RuntimeError, match=problem):
        capture.capture(wait)
