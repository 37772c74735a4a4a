"""Buckets that are reduced in the last backward, and gathers that are awaited where a parameter is first used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.comm.exchange import Pending
from megatrain.contracts.black_box.operations import Operation
from megatrain.ops.main_grad import main_grad_of
from megatrain.parallel.boxes import Box
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.placement import Placement
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.write_counts import WriteCounts
from megatrain.schedule import build_schedule
from megatrain.training.rank_model import RankModel
from tests.helpers.single_rank import gradients_by_name, make_config, microbatches, random_tokens, single_rank_model


def buckets_of(*num_writes: list[int]) -> list[list[LogicalParameter]]:
    """Return buckets of parameters with the declared number of writes."""
    placement = Placement("w", (3,), Box((0,), (3,)))
    return [
        [LogicalParameter(nn.Parameter(torch.zeros(3)), (placement,), count) for count in write] for write in num_writes
    ]


def whole_after(counts: WriteCounts, writes: list[tuple[int, int]], num_microbatches: int) -> list[bool]:
    """Record the writes of a window; return after each whether the first bucket is complete."""
    counts.begin(num_microbatches)
    found = []
    for bucket, index in writes:
        counts.count(bucket, index)
        found.append(counts.is_complete(0))
    return found


def test_a_bucket_is_whole_after_as_many_writes_as_declared() -> None:
    counts = WriteCounts(buckets_of([2, 1], [1]))
    writes = [(0, 0), (0, 0), (0, 1), (1, 0)]
    assert whole_after(counts, writes * 2, 2) == [False] * 6 + [True] * 2, "in the first window as in all others"
    assert whole_after(counts, writes * 3, 3)[-3:] == [False, True, True], "by micro-batch: their number may change"
    assert not any(whole_after(counts, (writes * 2)[:6], 2)), "one write of (0, 1) is missing"


def test_undeclared_gradient_write_is_an_error() -> None:
    counts = WriteCounts(buckets_of([1, 1]))
    with pytest.raises(RuntimeError, match="the gradient of w is written 3 times in 2 micro-batches, and 2 writes are"):
        whole_after(counts, [(0, 0)] * 3, 2)


def test_bucket_that_may_lack_a_gradient_does_not_start_early() -> None:
    """An expert that no token chose in a step must not delay its own bucket or later ones."""
    counts = WriteCounts(buckets_of([1], [1, 0], [1]))
    assert (counts.order, counts.num_early) == ((0, 2, 1), 2)
    assert whole_after(counts, [(1, 1), (1, 1), (0, 0), (1, 0)], 1)[-2:] == [True, True], "any number is valid"
    assert not counts.is_complete(1)


class OrderNotingGroup:
    """The group of a single rank: records when an exchange starts and is awaited; a gather completes when it is
    awaited."""

    name, size, rank = "dp", 1, 0

    def __init__(self, notes: list[str], number: str) -> None:
        self._notes = notes
        self._number = number

    def all_gather(self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int) -> Pending:
        values = out.clone()
        out.fill_(math.nan)
        self._notes.append(f"gather {self._number}")

        def land() -> None:
            out.copy_(values)
            self._notes.append(f"landed {self._number}")

        return Pending(out, land)

    def reduce_scatter(
        self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int, sums_in_fp32: bool
    ) -> Pending:
        self._notes.append(f"reduce {self._number}")
        return Pending(out)


def write_gradient(chunk: ChunkDataParallel, bucket: int) -> None:
    """Write to the gradient of the first parameter of a bucket."""
    main_grad = main_grad_of(chunk.buckets[bucket].parameters[0].parameter)
    assert main_grad is not None
    main_grad.add(lambda total, is_fresh: total.fill_(1.0))


NAMES = ("a", "b", "c")
"""Parameters in the order of their buckets, one each. A micro-batch may leave b without a gradient."""


def started_buckets(written: str, *, is_by_bucket: bool, zero_stage: int) -> tuple[list[str], list[str]]:
    """Return which buckets are reduced during a backward that writes to these parameters, and which after it."""
    # buckets are in backward order, the reverse of the forward's
    module = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in reversed(NAMES)})
    module.requires_grad_(requires_grad=False)  # the test writes the gradients itself
    parameters = [
        LogicalParameter(part.weight, (Placement(name, (1, 3), Box((0, 0), (1, 3))),), 0 if name == "b" else 1)
        for name, part in module.items()
    ]
    notes: list[str] = []
    group: Any = OrderNotingGroup(notes, "")
    options = DataParallelOptions(zero_stage, torch.float32, torch.float32, torch.float32, 1, has_overlap=is_by_bucket)
    chunk = ChunkDataParallel(parameters, {"dp": group}, options, torch.device("cpu"))
    for name, bucket in zip(NAMES, chunk.buckets, strict=True):
        bucket.replicas = OrderNotingGroup(notes, name)  # type: ignore[assignment]
    if is_by_bucket:
        chunk.overlap_by_bucket(module)
    chunk.start_step()
    chunk.set_num_microbatches(1)
    chunk.before_backward()
    for name in written:
        write_gradient(chunk, NAMES.index(name))
    num_early = len(notes)
    chunk.after_backward()
    chunk.reduce()
    chunk.finish_reduce()
    order = [note.removeprefix("reduce ") for note in notes]
    return order[:num_early], order[num_early:]


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_buckets_start_in_one_order_if_a_write_is_missing(zero_stage: int) -> None:
    """The ranks of a group start the same collectives in the same order, whichever gradients their samples give."""
    found = {
        (written, is_by_bucket): started_buckets(written, is_by_bucket=is_by_bucket, zero_stage=zero_stage)
        for written in ("abc", "ac", "ca", "a", "c", "bc", "b", "")
        for is_by_bucket in (True, False)
    }
    assert {(*early, *late) for early, late in found.values()} == {("a", "c", "b")}
    early = {written: "".join(early) for (written, is_by_bucket), (early, _) in found.items() if is_by_bucket}
    assert early == {"abc": "ac", "ac": "ac", "ca": "ac", "a": "a", "c": "", "bc": "", "b": "", "": ""}


def noting(rank_model: RankModel) -> list[str]:
    """Record the buckets' exchanges, and forward and backward of each part of the model."""
    notes: list[str] = []
    for number, chunk in enumerate(rank_model.data_parallel):
        for index, bucket in enumerate(chunk.buckets):
            bucket.replicas = OrderNotingGroup(notes, f"{number}.{index}")  # type: ignore[assignment]
    for pipeline_chunk in rank_model.pipeline.chunks:
        for name, block in pipeline_chunk.module.blocks.items():
            block.register_forward_hook(lambda *_, name=name: notes.append(f"forward {name}"))
    return notes


def run_step(rank_model: RankModel, seed: int, num_microbatches: int = 2, scale: float = 1.0) -> None:
    tokens = random_tokens(rank_model.config, seed, num_microbatches * rank_model.config.batch.micro_batch_size)
    inputs = microbatches(rank_model, tokens)
    for chunk in rank_model.data_parallel:
        chunk.start_step()
    schedule = build_schedule(
        rank_model.config.parallel.schedule, 1, rank_model.config.parallel.num_chunks, len(inputs)
    )
    loss_scale = torch.tensor(scale / tokens[1:].numel(), dtype=torch.float64)
    losses = rank_model.pipeline.train(schedule, inputs, lambda: loss_scale)
    assert torch.isfinite(losses.total)
    for chunk in rank_model.data_parallel:
        chunk.finish_reduce()
    rank_model.advance_fp8_scales()


CASES: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "tied": {"model": {"has_tied_head": True}},
    "zero 2": {"parallel": {"zero_stage": 2}},
    "zero 2, tied": {"parallel": {"zero_stage": 2}, "model": {"has_tied_head": True}},
    "selective": {"parallel": {"recompute": "selective"}},
    "full": {"parallel": {"recompute": "full"}},
    "chunks, tied": {"parallel": {"num_chunks": 2, "schedule": "interleaved"}, "model": {"has_tied_head": True}},
    "zero 2, chunks, tied": {
        "parallel": {"num_chunks": 2, "schedule": "interleaved", "zero_stage": 2}, "model": {"has_tied_head": True},
    },
    "dropout, documents": {"model": {"dropout": 0.1}, "data": {"has_document_mask": True}},
    "fp8": {"train": {"precision": "bf16"}, "fp8": {"recipe": "tensorwise", "scaling": "delayed"}},
    "fp8, full, zero 2": {
        "train": {"precision": "bf16"}, "fp8": {"recipe": "tensorwise", "scaling": "delayed"},
        "parallel": {"recompute": "full", "zero_stage": 2},
    },
}  # fmt: skip
MODEL = {"vocab_size": 61, "seq_len": 8, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "vocab_multiple": 8}


def make_rank_model(case: str, **parallel: Any) -> RankModel:
    tables = CASES[case]
    return single_rank_model(
        make_config(
            model={**MODEL, "has_tied_head": False, **tables.get("model", {})},
            parallel={"bucket_size": 500, **tables.get("parallel", {}), **parallel},
            **{name: keys for name, keys in tables.items() if name not in ("model", "parallel")},
        )
    )


@pytest.mark.slow(kept=["one chunk"])
@pytest.mark.parametrize("case", CASES)
def test_early_buckets_start_in_order_and_are_bitwise_equal(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = make_rank_model(case), make_rank_model(case, overlap=False)
    notes = noting(early)
    noting(late)
    num_chunks = len(early.data_parallel)
    zero_stage = early.config.parallel.zero_stage
    completed: list[int] = []
    for chunk in early.data_parallel:
        name = "reduce" if zero_stage == 1 else "after_backward"
        monkeypatch.setattr(chunk, name, partial(_completed, notes, completed, getattr(chunk, name)))
    # another number of micro-batches from step to step, as in a ramp-up; the third step's gradients are not finite
    for step, (num_microbatches, scale) in enumerate(((2, 1.0), (3, 1.0), (2, math.nan), (1, 1.0))):
        notes.clear()
        completed.clear()
        run_step(early, step, num_microbatches, scale)
        run_step(late, step, num_microbatches, scale)

        gradients = gradients_by_name(early)
        assert gradients
        assert all(
            torch.equal(gradients[name].nan_to_num(), one.nan_to_num()) for name, one in gradients_by_name(late).items()
        )
        assert math.isnan(scale) == any(gradient.isnan().any() for gradient in gradients.values())
        of_chunks = {
            number: [note for note in notes if note.startswith(f"reduce {number}.")] for number in range(num_chunks)
        }
        times = num_microbatches if zero_stage == 2 else 1
        for number, chunk in enumerate(early.data_parallel):
            in_order = [f"reduce {number}.{index}" for index in range(len(chunk.buckets))]
            assert of_chunks[number] == in_order * times
        # No exchange is left to complete, except for the bucket of an embedding whose other write came before the
        # chunk's own backward, and the one after it.
        left = [0, 2] if case == "zero 2, chunks, tied" else [0] * num_chunks
        assert completed == left * times


def test_tied_head_in_another_chunk_adds_to_the_same_gradient() -> None:
    two, one = make_rank_model("zero 2, chunks, tied"), make_rank_model("chunks, tied")
    for step in range(2):
        run_step(two, step)
        run_step(one, step)
        gradients = gradients_by_name(two)
        for name, expected in gradients_by_name(one).items():
            torch.testing.assert_close(gradients[name], expected)


def test_gradient_after_the_last_reduction_is_an_error() -> None:
    rank_model = make_rank_model("zero 2", overlap=False)
    (chunk,) = rank_model.data_parallel
    run_step(rank_model, 1)
    write_gradient(chunk, 0)
    with pytest.raises(RuntimeError, match=r"the gradients of \S+ were written after the last reduction of the step"):
        chunk.finish_reduce()


def _completed(notes: list[str], completed: list[int], complete: Callable[[], None]) -> None:
    """Record how many buckets had not started early."""
    num_notes = len(notes)
    complete()
    completed.append(len(notes) - num_notes)


@pytest.mark.parametrize("case", ["one chunk", "tied"])
def test_undeclared_use_of_a_parameter_ends_the_step(case: str) -> None:
    rank_model = make_rank_model(case)
    head = rank_model.pipeline.chunks[0].module.loss_head
    head.forward = partial(_twice, head.forward)
    with pytest.raises(
        RuntimeError, match=r"weight is written \d times in 2 micro-batches, and \d writes are declared"
    ):
        run_step(rank_model, 1)


def _twice(forward: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return forward(*arguments) + forward(*arguments)


@pytest.mark.slow(kept=["one chunk", "chunks, tied"])
@pytest.mark.parametrize("case", ["one chunk", "tied", "full", "chunks, tied"])
def test_parameters_are_gathered_before_their_use(case: str) -> None:
    rank_model, plain = make_rank_model(case), make_rank_model(case, overlap=False)
    notes = noting(rank_model)
    for chunk in rank_model.data_parallel:
        chunk.mark_shards_changed()
    run_step(rank_model, 1)
    run_step(plain, 1)

    # Parameters that had not arrived were NaN.
    gradients = gradients_by_name(rank_model)
    assert all(torch.equal(gradients[name], one) for name, one in gradients_by_name(plain).items())
    landed = [note for note in notes if note.startswith("landed")]
    gathers = [note for note in notes if note.startswith("gather")]
    assert len(landed) == len(set(landed)) == len(gathers)
    assert notes.index("forward 0") < notes.index(landed[-1]), "some arrive during the forward"
    # They are gathered when the forward needs them.
    for number, chunk in enumerate(rank_model.data_parallel):
        expected = [f"gather {number}.{index}" for index in reversed(range(len(chunk.buckets)))]
        assert [note for note in gathers if note.startswith(f"gather {number}.")] == expected


def test_a_parameter_that_no_part_waits_for_is_refused() -> None:
    rank_model = make_rank_model("one chunk")
    module = rank_model.pipeline.chunks[0].module
    module.register_parameter("loose", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="no part of the chunk waits for loose to be gathered"):
        rank_model.data_parallel[0].overlap_by_bucket(module)


def test_without_the_wait_of_a_part_its_output_would_be_wrong() -> None:
    """The fault that the other tests would detect."""
    rank_model = make_rank_model("one chunk")
    noting(rank_model)
    block = rank_model.pipeline.chunks[0].module.blocks["3"]
    block._forward_pre_hooks.clear()
    for chunk in rank_model.data_parallel:
        chunk.mark_shards_changed()
    with pytest.raises(AssertionError):
        run_step(rank_model, 1)


def test_aligned_reductions_reduce_at_the_end() -> None:
    keys = itertools.product((True, False), (True, False))
    found = {
        (overlap, aligned): make_config(
            model=MODEL, parallel={"overlap": overlap, "has_aligned_reductions": aligned}
        ).parallel.overlaps_by_bucket
        for overlap, aligned in keys
    }
    assert found == {(True, True): False, (True, False): True, (False, True): False, (False, False): False}
