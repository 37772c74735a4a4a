"""Footprints add up along a chunk, and the walk over a stage's actions holds what is alive at each of them."""

from __future__ import annotations

import pytest

from benchmarks.memory import with_changes
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.planning.blocks import block_footprint, fp8_inputs, fp8_staying
from megatrain.planning.chunks import plan_stage
from megatrain.planning.footprint import Footprint, Ledger, in_a_row
from megatrain.planning.memory import estimate_memory
from megatrain.planning.step_memory import ChunkMemory, Moment, StepWalk
from megatrain.planning.tensor_bytes import tensor_bytes
from megatrain.schedule import build_schedule, peak_in_flight
from tests.helpers.lone_rank import simulated_group

KEPT, MESSAGE = 1000, 1
PLAIN = ChunkMemory(Footprint(kept=KEPT, forward=KEPT, backward=KEPT + 1), 0, 0, 0, 0)


def walked(name: str, pp_size: int, num_chunks: int, stage: int, chunk: ChunkMemory, **changes: object) -> Moment:
    changes = {"parallel__pp_size": pp_size, **changes}
    config = Config.from_dict(with_changes({key.replace("__", "."): value for key, value in changes.items()}))
    schedule = build_schedule(name, pp_size, num_chunks, 8)
    return StepWalk(config, stage, [chunk] * num_chunks, MESSAGE).run(schedule.stages[stage])


def test_ledger_keeps_the_most_that_was_alive_together() -> None:
    ledger = Ledger(10)
    ledger.hold(5, 5)
    ledger.release(5)
    ledger.visit(7)
    ledger.visit(1)

    assert (ledger.live, ledger.peak) == (15, 22)


def test_parts_in_a_row() -> None:
    first = Footprint(kept=10, forward=50, backward=30)
    second = Footprint(kept=20, forward=25, backward=60)
    third = Footprint(kept=5, forward=6, backward=7)

    # forward: the first part's own peak; backward: the second's, beside what the first still keeps
    assert in_a_row([first, second, third]) == Footprint(kept=35, forward=50, backward=10 + 60)
    assert in_a_row([first]) == first


def test_parts_in_a_row_that_put_something_off() -> None:
    first = Footprint(kept=10, forward=50, backward=35, put_off=3)
    second = Footprint(kept=20, forward=25, backward=60, put_off=40)

    # what the second part put off is there when the first one runs backward, which then is the fullest moment
    assert in_a_row([first, second]) == Footprint(kept=30, forward=50, backward=35 + 40, put_off=43)


def test_factors_of_what_is_put_off_outlive_their_product() -> None:
    whole, split = Ledger(10), Ledger(10, is_split=True)
    for ledger in (whole, split):
        ledger.hold(5)
        ledger.release_factors(5, 4)
        ledger.share_factor(2)
        ledger.hold(3)

    assert (whole.live, whole.peak, whole.put_off) == (9, 15, 0)
    assert (split.live, split.peak, split.put_off) == (18, 18, 11)


@pytest.mark.parametrize(("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_activations_are_those_in_flight(name: str, num_chunks: int, stage: int) -> None:
    moment = walked(name, 4, num_chunks, stage, PLAIN)

    assert moment.activations == KEPT * peak_in_flight(build_schedule(name, 4, num_chunks, 8))[stage]


@pytest.mark.parametrize(("stage", "num_kept", "num_put_off"), [(0, 4, 0), (1, 3, 1), (3, 1, 3)])
def test_what_is_put_off_is_held_until_it_is_made_up_for(stage: int, num_kept: int, num_put_off: int) -> None:
    put_off = 300
    chunk = ChunkMemory(Footprint(KEPT, KEPT, KEPT + 500, put_off=put_off), 0, 0, 0, 0)
    moment = walked("zero_bubble", 4, 1, stage, chunk, parallel__schedule="zero_bubble")

    assert moment.activations == num_kept * KEPT + num_put_off * put_off
    assert (moment.working, moment.what) == (500, "backward of chunk 0")


def test_the_fullest_moment_may_be_that_of_weights_gradients() -> None:
    """Where products keep more than backward did: all that was put off is there before the first one is made up for."""
    chunk = ChunkMemory(Footprint(0, 0, 0, put_off=300), 0, 0, 0, 0)
    moment = walked("zero_bubble", 4, 1, 3, chunk, parallel__schedule="zero_bubble")

    assert (moment.activations, moment.what) == (4 * 300, "weights' gradients of chunk 0")


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_undelivered_messages_are_few(name: str) -> None:
    # on the first stage of two, when most is in flight: the last output, and the gradient that is awaited next
    assert walked(name, 2, 1, 0, PLAIN).messages <= 3 * MESSAGE


@pytest.mark.parametrize(("overlap", "num_ahead"), [(True, 1), (False, 0)])
def test_without_overlap_no_message_is_awaited_ahead(overlap: bool, num_ahead: int) -> None:
    """The estimate walks the trainer's own schedule, which posts receives late where nothing overlaps."""
    changes = {"parallel.pp_size": 2, "parallel.overlap": overlap, "runtime.device": "cuda"}
    config, layout = Config.from_dict(with_changes(changes)), Layout(pp_size=2)
    memory = estimate_memory(config, layout, 1, plan_stage(config, layout, 1, simulated_group("tp", 1, 0)))

    assert memory.messages == num_ahead * tensor_bytes(config, 1).hidden_local


def test_backward_works_on_top_of_what_it_keeps() -> None:
    chunk = ChunkMemory(Footprint(kept=KEPT, forward=KEPT + 1, backward=KEPT + 300), 0, 0, 0, 0)
    moment = walked("1f1b", 1, 1, 0, chunk)

    assert (moment.activations, moment.working, moment.what) == (KEPT, 300, "backward of chunk 0")


def test_zero_2_holds_whole_gradients_in_backward_and_on_their_way() -> None:
    chunk = ChunkMemory(Footprint(KEPT, KEPT, KEPT), whole_gradients=400, travelling=400, exchanged=0, copied=0)

    assert walked("1f1b", 1, 1, 0, chunk, parallel__zero_stage=1).travelling == 0
    moment = walked("1f1b", 1, 1, 0, chunk, parallel__zero_stage=2)
    assert (moment.travelling, moment.what) == (400, "backward of chunk 0")


@pytest.mark.parametrize("overlap", [True, False])
def test_what_arrives_of_other_ranks_is_there_for_one_chunk_at_a_time(overlap: bool) -> None:
    chunk = ChunkMemory(Footprint(0, 0, 0), whole_gradients=400, travelling=400, exchanged=50, copied=0)
    moment = walked("interleaved", 1, 2, 0, chunk, parallel__overlap=overlap)

    assert moment.travelling == (2 * 400 + 50 if overlap else 400 + 50)


def test_a_copy_in_another_type_is_beside_the_gradients_for_a_moment() -> None:
    chunk = ChunkMemory(Footprint(0, 0, 0), whole_gradients=400, travelling=200, exchanged=0, copied=200)
    moment = walked("1f1b", 1, 1, 0, chunk, parallel__zero_stage=2)

    assert (moment.total, moment.what) == (600, "reduction of chunk 0")


def test_transformer_engine_keeps_weights_in_eight_bits_for_each_micro_batch() -> None:
    kept, staying = [], []
    for backend in ("megatrain", "transformer_engine"):
        changes = {"fp8.recipe": "tensorwise", "fp8.backend": backend, "train.precision": "bf16"}
        config = Config.from_dict(with_changes(changes))
        kept.append(block_footprint(config, tensor_bytes(config, 2)).kept)
        staying.append(fp8_staying(config, tensor_bytes(config, 2)))

    # GPT: attention has 4 H^2 weights, the MLP 8 H^2; each is kept as it is and transposed, a byte an element
    weights = 2 * 12 * config.model.hidden_size**2 // 2
    assert kept[1] - kept[0] == weights
    assert staying == [0, weights + fp8_inputs(config, tensor_bytes(config, 2))]
