"""What a rank tells a watcher of its hangs: which exchange it waits for, how long phases take, that it lives."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.contracts.black_box import write_control
from megatrain.contracts.black_box_values import ControlPage, Phase
from megatrain.contracts.operations import Operation
from tests.unit.telemetry.conftest import Boxed

Boxes = Callable[..., Boxed]


def awaited(box: Boxed) -> tuple[int, int]:
    progress = box.read().progress
    return progress.awaited_group, progress.awaited_place


def test_the_exchange_that_the_host_waits_for_is_told_from_those_on_their_way(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    first, second = recorder.add_group("dp", [0, 2]), recorder.add_group("pp", [2, 3])
    assert awaited(box) == (0, 0)
    reduction = recorder.begin(Operation.GRADS_REDUCE_SCATTER, group=first)
    assert awaited(box) == (0, 0)
    receive = recorder.begin(Operation.FORWARD_RECV, group=second)
    recorder.await_end(receive)
    assert awaited(box) == (second, 1)
    recorder.end(receive)
    assert box.read().groups[second].left == 1, "the wait is over"
    recorder.await_end(reduction)
    assert awaited(box) == (first, 1)
    recorder.end(reduction)
    recorder.await_end(reduction)
    recorder.await_end(0)
    assert awaited(box) == (first, 1)


def test_an_exchange_that_is_not_measured_is_awaited_all_the_same(boxed: Boxes) -> None:
    box = boxed()
    group = box.recorder.add_group("dp", [0, 2])
    write_control(box.path, ControlPage(span_mask=0, round=1))
    box.recorder.set_step(0)
    token = box.recorder.begin(Operation.DP_ALL_REDUCE, group=group)
    box.recorder.await_end(token)
    assert awaited(box) == (group, 1)
    assert (box.read().groups[group].entered, box.read().groups[group].left) == (1, 0)
    box.recorder.end(token)
    assert (box.read().groups[group].entered, box.read().groups[group].left) == (1, 1)


def test_a_phase_teaches_how_long_it_takes_once_training_has_begun(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_phase(Phase.CHECKPOINT)  # the load
    recorder.set_step(0)
    assert box.read().progress.longest_checkpoint_ns is None
    recorder.complete_step()
    recorder.set_phase(Phase.CHECKPOINT)
    began = time.monotonic_ns()
    while time.monotonic_ns() < began + 2_000_000:
        pass
    recorder.set_phase(Phase.EVALUATION)
    longest = box.read().progress.longest_checkpoint_ns
    assert longest is not None
    assert longest >= 2_000_000
    recorder.set_step(1)
    assert box.read().progress.longest_evaluation_ns is not None
    recorder.set_phase(Phase.CHECKPOINT)
    recorder.set_step(2)
    assert box.read().progress.longest_checkpoint_ns == longest, "a shorter one changes nothing"


def test_a_sign_of_life_makes_a_phase_young_and_its_length_is_still_known(boxed: Boxes) -> None:
    box = boxed()
    recorder = box.recorder
    recorder.set_step(0)
    recorder.complete_step()
    recorder.set_phase(Phase.CHECKPOINT)
    began = box.read().progress.phase_since_ns
    while time.monotonic_ns() < began + 2_000_000:
        pass
    recorder.show_life()
    assert box.read().progress.phase_since_ns >= began + 2_000_000
    assert box.read().progress.phase is Phase.CHECKPOINT
    recorder.set_step(1)
    assert (box.read().progress.longest_checkpoint_ns or 0) >= 2_000_000
