"""The walk over a stage's actions counts the live tensors at each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.memory import with_changes
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.planning.chunks import plan_stage, planned_mesh
from megatrain.planning.footprint import Footprint, MeasuredChunk
from megatrain.planning.memory import estimate_memory
from megatrain.planning.step_memory import ChunkMemory, Moment, StepWalk
from megatrain.schedule import build_schedule, peak_in_flight

KEPT, MESSAGE = 1000, 1


def footprint(kept: int, forward: int, backward: int, deferred: int = 0) -> Footprint:
    """Return a footprint that does not depend on whether its micro-batch is the newest."""
    return Footprint(kept, forward, backward, deferred, forward_after_newest=forward, backward_of_newest=backward)


PLAIN = ChunkMemory(footprint(kept=KEPT, forward=KEPT, backward=KEPT + 1), 0, 0, 0, 0, 0)


def walked(name: str, pp_size: int, num_chunks: int, stage: int, chunk: ChunkMemory, **changes: object) -> Moment:
    changes = {"parallel__pp_size": pp_size, **changes}
    config = Config.from_dict(with_changes({key.replace("__", "."): value for key, value in changes.items()}))
    schedule = build_schedule(name, pp_size, num_chunks, 8)
    return StepWalk(config, stage, [chunk] * num_chunks, MESSAGE).run(schedule.stages[stage])


@pytest.mark.parametrize(("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_activations_are_those_in_flight(name: str, num_chunks: int, stage: int) -> None:
    moment = walked(name, 4, num_chunks, stage, PLAIN)

    assert moment.activations == KEPT * peak_in_flight(build_schedule(name, 4, num_chunks, 8))[stage]


@pytest.mark.parametrize(("stage", "num_kept", "num_deferred"), [(0, 4, 0), (1, 3, 1), (3, 1, 3)])
def test_factors_of_deferred_wgrads_are_held_until_they_run(stage: int, num_kept: int, num_deferred: int) -> None:
    deferred = 300
    chunk = ChunkMemory(footprint(KEPT, KEPT, KEPT + 500, deferred=deferred), 0, 0, 0, 0, 0)
    moment = walked("zero_bubble", 4, 1, stage, chunk, parallel__schedule="zero_bubble")

    assert moment.activations == num_kept * KEPT + num_deferred * deferred
    assert (moment.working, moment.what) == (500, "backward of chunk 0")


def test_the_fullest_moment_may_be_that_of_weights_gradients() -> None:
    """If products keep more than backward did: all deferred work is present before the first one runs."""
    chunk = ChunkMemory(footprint(0, 0, 0, deferred=300), 0, 0, 0, 0, 0)
    moment = walked("zero_bubble", 4, 1, 3, chunk, parallel__schedule="zero_bubble")

    assert (moment.activations, moment.what) == (4 * 300, "weights' gradients of chunk 0")


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_undelivered_messages_are_few(name: str) -> None:
    # on the first stage of two, with the most in flight: the last output, and the gradient that is awaited next
    assert walked(name, 2, 1, 0, PLAIN).messages <= 3 * MESSAGE


@pytest.mark.parametrize(("overlap", "num_ahead"), [(True, 1), (False, 0)])
def test_without_overlap_no_message_is_awaited_ahead(overlap: bool, num_ahead: int) -> None:
    """The estimate walks the trainer's own schedule, which posts receives late if nothing overlaps."""
    changes = {"parallel.pp_size": 2, "parallel.overlap": overlap, "runtime.device": "cuda"}
    config, layout = Config.from_dict(with_changes(changes)), Layout(pp_size=2)
    with planned_mesh(config, layout, 1) as mesh:
        (chunk,) = plan_stage(config, mesh)
    fullest_in_backward = footprint(KEPT, KEPT, 10**9)
    chunk = replace(chunk, measured=MeasuredChunk(fullest_in_backward, tables=0, num_microbatches=2))
    memory = estimate_memory(config, layout, 1, [chunk])

    model = config.model
    assert memory.messages == num_ahead * 4 * model.seq_len * config.batch.micro_batch_size * model.hidden_size


def test_backward_works_on_top_of_what_it_keeps() -> None:
    chunk = ChunkMemory(footprint(kept=KEPT, forward=KEPT + 1, backward=KEPT + 300), 0, 0, 0, 0, 0)
    moment = walked("1f1b", 1, 1, 0, chunk)

    assert (moment.activations, moment.working, moment.what) == (KEPT, 300, "backward of chunk 0")


def test_zero_2_holds_whole_gradients_until_they_are_reduced() -> None:
    chunk = ChunkMemory(
        footprint(KEPT, KEPT, KEPT), whole_gradients=400, traveling=400, exchanged=0, summed=0, copied=0
    )

    assert walked("1f1b", 1, 1, 0, chunk, parallel__zero_stage=1).traveling == 0
    moment = walked("1f1b", 1, 1, 0, chunk, parallel__zero_stage=2)
    assert (moment.traveling, moment.what) == (400, "backward of chunk 0")


@pytest.mark.parametrize("overlap", [True, False])
def test_received_gradients_are_held_for_one_chunk_at_a_time(overlap: bool) -> None:
    chunk = ChunkMemory(footprint(0, 0, 0), whole_gradients=400, traveling=400, exchanged=50, summed=0, copied=0)
    moment = walked("interleaved", 1, 2, 0, chunk, parallel__overlap=overlap)

    assert moment.traveling == (2 * 400 + 50 if overlap else 400 + 50)


def test_copy_in_another_dtype_is_held_briefly() -> None:
    chunk = ChunkMemory(footprint(0, 0, 0), whole_gradients=400, traveling=200, exchanged=0, summed=70, copied=200)
    moment = walked("1f1b", 1, 1, 0, chunk, parallel__zero_stage=2)

    assert (moment.total, moment.what) == (600, "reduction of chunk 0")


def test_each_bucket_is_exchanged_among_its_own_replicas() -> None:
    """Experts may have one holder each although all other parameters have several."""
    changes = {"train.precision": "bf16", "parallel.grad_reduce_dtype": "bf16", "parallel.dp_size": 2}
    config = Config.from_dict(with_changes(changes))
    buckets = {}
    for dp_size in (1, 2):
        with planned_mesh(config, Layout(dp_size=dp_size), 0) as mesh:
            (chunk,) = plan_stage(config, mesh)
            buckets[dp_size] = chunk.buckets[0]

    def traveling(*dp_sizes: int) -> int:
        empty = MeasuredChunk(footprint(0, 0, 0), 0, 2)
        planned = replace(chunk, buckets=tuple(buckets[size] for size in dp_sizes), measured=empty)
        return estimate_memory(config, Layout(dp_size=2), 0, [planned]).traveling

    assert traveling(1) == 0
    assert traveling(1, 2) == traveling(2, 1) == traveling(2) > 0


@pytest.mark.parametrize(
    ("name", "moment", "total"),
    [("gpipe", "forward of chunk 0", 7 * 100 + 30 + 300), ("1f1b", "backward of chunk 0", 380)],
)
def test_activations_not_yet_offloaded_are_of_the_newest(name: str, moment: str, total: int) -> None:
    """If all blocks are offloaded: the last block's activations are copied out during the next forward."""
    offloaded = Footprint(kept=100, forward=150, backward=220, kept_of_newest=30, forward_after_newest=300,
                          backward_of_newest=380)  # fmt: skip
    found = walked(name, 1, 1, 0, ChunkMemory(offloaded, 0, 0, 0, 0, 0))

    assert (found.what, found.total) == (moment, total)
