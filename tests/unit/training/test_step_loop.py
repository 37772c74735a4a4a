"""The step loop: its calls, their order and their arguments around steps, saves, evaluations and a load."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.continuation import Continuation, TrainingProgress
from megatrain.checkpoint.job_restore import RestoreResult
from megatrain.checkpoint_format.sample_stream import MixtureStage, StreamSource
from megatrain.config import parallel as parallel_module
from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.black_box.values import Command, ControlPage, Phase
from megatrain.data.reader import BatchReader
from megatrain.optim import ShardedOptimizer, learning_rate
from megatrain.telemetry.flops import training_flops_per_token
from megatrain.training import evaluation as evaluation_module
from megatrain.training.observers.overlap_watch import OverlapWatch
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans, spans_by_step
from tests.helpers.one_source import stream_of_one
from tests.helpers.single_rank import add_to_losses
from tests.helpers.single_rank_trainer import Note, SingleRankTrainer

STEPS = 5
MakeTrainer = Callable[..., SingleRankTrainer]

TIMEOUTS: dict[str, dict[str, Any]] = {
    "runtime": {
        "first_step_timeout_s": 11.0,
        "step_timeout_s": 12.0,
        "checkpoint_timeout_s": 13.0,
        "evaluation_timeout_s": 14.0,
    }
}
FIRST_STEP, STEP = ("timeout", 11.0), ("timeout", 12.0)


def around(seconds: float, phase: Phase, *inside: Note) -> list[Note]:
    """Return the expected calls around a phase that has a separate timeout."""
    return [("timeout", seconds), ("grace", seconds), ("phase", phase), *inside, ("grace", 0.0), STEP]


def test_the_learning_rate_of_a_step_is_that_of_its_number(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    step = ShardedOptimizer.step

    def note(self: ShardedOptimizer, lr: float, gradient_scale: float) -> None:
        given.append(lr)
        step(self, lr, gradient_scale)

    monkeypatch.setattr(ShardedOptimizer, "step", note)
    made = make_trainer()
    made.run()

    config = made.config.optimizer
    expected = [learning_rate(config, number, STEPS) for number in range(STEPS)]
    assert len(set(expected)) >= STEPS - 1
    assert given == expected
    assert [report.lr for report in made.reports.steps] == expected


def test_every_phase_has_its_own_timeout_and_grace(make_trainer: MakeTrainer) -> None:
    made = make_trainer(TIMEOUTS, {"checkpoint": {"interval": 2}, "evaluation": {"interval": 4}})
    made.run()

    found = made.noted("timeout", "grace", "phase", "take", "wait")
    first, later = ("phase", Phase.FIRST_STEP), ("phase", Phase.STEP)
    saved = {step: around(13.0, Phase.CHECKPOINT, ("take", step)) for step in (2, 4)}
    evaluated = around(14.0, Phase.EVALUATION)
    assert found == [
        *around(13.0, Phase.CHECKPOINT),
        *(FIRST_STEP, first, STEP, later),
        *(*saved[2], later, later, *saved[4]),
        *(*evaluated, later, *evaluated),
        ("phase", Phase.STOPPING),
        *around(13.0, Phase.STOPPING, ("wait", 4)),
    ]


def test_a_load_has_its_own_timeout_and_grace_too(make_trainer: MakeTrainer) -> None:
    made = make_trainer(TIMEOUTS)
    found = Continuation(
        TrainingProgress(step=3, consumed_samples=12, num_updates=2), stream_of_one(0, seed=0), ("a note",)
    )
    made.checkpoints.restored = RestoreResult(found, "step-3", 7_000_000, ("WARNING: step-4 was damaged",))
    made.trainer.load()

    assert made.notes == around(13.0, Phase.CHECKPOINT, ("restore",))
    assert made.trainer.step == 3
    assert made.rank_model.optimizer.num_updates == 2
    assert made.reports.texts[:2] == ["WARNING: step-4 was damaged", "a note"]
    assert re.fullmatch(r"resumed at step 3 from step-3 in \d+\.\d\d s \(7 MB read by rank 0\)", made.reports.texts[2])
    made.notes.clear()
    made.trainer.train()
    # the first step of this process, not of the run
    assert made.noted("timeout")[:2] == [FIRST_STEP, STEP]
    assert [report.step for report in made.reports.steps] == [4, 5]


@pytest.mark.parametrize(("interval", "expected"), [(0, [5]), (2, [2, 4, 5]), (5, [5])])
def test_evaluations_come_at_their_interval_and_at_the_end(
    interval: int, expected: list[int], make_trainer: MakeTrainer
) -> None:
    made = make_trainer({"evaluation": {"interval": interval}})
    made.run()

    assert [report.step for report in made.reports.evaluations] == expected
    assert {report.num_tokens for report in made.reports.evaluations} == {70}


@pytest.mark.slow(kept=["options2-expected2", "options1-expected1"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"save_at_end": True}, [5]),
        ({"interval": 2}, [2, 4]),
        ({"interval": 2, "save_at_end": True}, [2, 4, 5]),
        ({"interval": 5, "save_at_end": True}, [5]),
    ],
)
def test_saves_come_at_their_interval_and_once_at_the_end(
    options: dict[str, Any], expected: list[int], make_trainer: MakeTrainer
) -> None:
    made = make_trainer({"checkpoint": options})
    made.run()

    assert made.noted("take", "wait") == [("take", step) for step in expected] + [
        ("wait", step) for step in expected[-1:]
    ]


def test_profiler_and_collector_are_called_every_step(make_trainer: MakeTrainer) -> None:
    made = make_trainer({"checkpoint": {"interval": 1}, "train": {"steps": 2}, "optimizer": {"lr_warmup_steps": 1}})
    made.run()

    # The collector runs before a save, which is a step boundary of all ranks.
    assert made.noted("before step", "after step", "garbage", "take") == [
        *(("before step", 0), ("after step", 0), ("garbage", 1), ("take", 1)),
        *(("before step", 1), ("after step", 1), ("garbage", 2), ("take", 2)),
    ]


def test_overlap_messages_go_to_the_log(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverlapWatch, "after_step", lambda _, done: f"judged step {done.index}")
    made = make_trainer()
    made.run()

    reported = [text for text in made.reports.texts if text.startswith("judged")]
    assert reported == [f"judged step {step}" for step in range(made.config.train.steps)]


def test_log_reports_checksums_without_replicas(make_trainer: MakeTrainer) -> None:
    made = make_trainer({"train": {"checksum_interval": 2, "steps": 2}, "optimizer": {"lr_warmup_steps": 1}})
    made.run()

    assert "train.checksum_interval=2: no rank has a replica to compare with" in made.reports.texts


def test_each_phase_of_a_step_is_a_span(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    directory = tmp_path / "boxes"
    directory.mkdir()
    made = make_trainer(
        {"train": {"steps": 2, "gc_interval": 2}, "optimizer": {"lr_warmup_steps": 1}},
        {"checkpoint": {"interval": 2}},
        recording_in(directory),
    )
    made.run()
    (box,) = boxes_by_rank(directory).values()

    each_step = (Operation.STEP, Operation.CLIP, Operation.OPTIMIZER)
    for operation in each_step:
        assert spans_by_step(box, operation) == {0: 1, 1: 1}, operation
    for operation in (Operation.GC, Operation.EVALUATION):
        assert spans_by_step(box, operation) == {1: 1}, operation
    # The snapshot, and at the end the wait for storage.
    assert spans_by_step(box, Operation.CHECKPOINT) == {1: 2}
    assert box.in_flight == ()
    # Data is awaited outside of the step's computation, which contains clipping and update, and then in the evaluation.
    (evaluation,) = spans(box, Operation.EVALUATION)
    first, second, *held_out = spans(box, Operation.DATA_WAIT)
    assert (first.step, second.step) == (0, 1)
    assert held_out
    for read in held_out:
        assert read.step == 1
        assert evaluation.start_ns <= read.start_ns
        assert read.start_ns + (read.duration_ns or 0) <= evaluation.start_ns + (evaluation.duration_ns or 0)
    for wait, step, update in zip(
        (first, second), *(spans(box, one) for one in (Operation.STEP, Operation.OPTIMIZER)), strict=True
    ):
        assert wait.duration_ns is not None
        assert step.duration_ns is not None
        assert wait.start_ns + wait.duration_ns <= step.start_ns <= update.start_ns
        assert update.start_ns < step.start_ns + step.duration_ns
    assert (box.progress.completed_step, box.progress.phase) == (1, Phase.STOPPING)


def test_results_of_a_step_are_recorded(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    directory = tmp_path / "boxes"
    directory.mkdir()
    made = make_trainer(recording_in(directory), {"telemetry": {"peak_tflops": 2.5}})
    made.run()
    (box,) = boxes_by_rank(directory).values()
    seq_len, num_samples = made.config.model.seq_len, 4

    for number, report in enumerate(made.reports.steps):
        found = {StepValue(value.kind_number): value.value for value in box.values if value.step == number}
        assert found == {
            StepValue.LOSS: report.loss,
            StepValue.GRAD_NORM: report.grad_norm,
            StepValue.TOKENS: report.num_tokens,
            StepValue.LABEL_TOKENS: report.num_tokens,
            StepValue.SQUARED_LENGTHS: num_samples * seq_len**2,
            StepValue.DOCUMENTS: num_samples,
            StepValue.MODEL_FLOPS: report.num_tokens * training_flops_per_token(made.config.model),
            StepValue.PEAK_FLOPS: 2.5e12,
        }


def test_reports_have_time_tokens_and_memory(make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.run()

    for number, report in enumerate(made.reports.steps, start=1):
        assert (report.step, report.consumed_samples, report.consumed_tokens) == (number, 4 * number, 64 * number)
        assert (report.num_tokens, report.global_batch_size, report.world_size) == (64, 4, 1)
        assert 0.0 < report.data_wait_s < report.duration_s
        # Python and torch alone take more, and no test machine has a terabyte.
        assert 50 << 20 < report.memory_bytes < 1 << 40


@pytest.mark.parametrize(("overlap", "receives_ahead"), [(True, 1), (False, 0)])
def test_the_schedule_is_that_of_the_configuration(
    overlap: bool, receives_ahead: int, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    build = parallel_module.build_schedule

    def note(*place: Any, **options: Any) -> Any:
        asked.append((place, options))
        return build(*place, **options)

    monkeypatch.setattr(parallel_module, "build_schedule", note)
    made = make_trainer({"parallel": {"overlap": overlap}})
    made.run()

    options = {"receives_ahead": receives_ahead, "has_aligned_reductions": False}
    assert asked == [(("1f1b", 1, 1, 2), options)] * STEPS


def test_a_command_of_the_executor_takes_a_checkpoint_once(make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.recorder.control = ControlPage(command_number=3, command=Command.CHECKPOINT)
    completed: list[int] = []
    made.recorder.set_completed_command = completed.append  # type: ignore[method-assign]
    made.run()

    assert made.noted("take", "wait") == [("take", 1), ("wait", 1)]
    assert completed == [3]


@pytest.mark.parametrize("command", [0, 57], ids=["none", "of a newer program"])
def test_unknown_command_of_the_executor_is_ignored(command: int, make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.recorder.control = ControlPage(command_number=3, command=command)
    made.run()
    assert made.noted("take") == []


def test_finished_run_does_not_train(make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.checkpoints.restored = RestoreResult(
        Continuation(TrainingProgress(step=STEPS), stream_of_one(0, seed=0), ()), "step-5", 0, ()
    )
    made.run()

    assert made.reports.texts[-1] == f"nothing to do: {STEPS} steps are done, train.steps={STEPS}"
    assert made.reports.steps == []
    assert made.noted("take", "wait") == [("wait", STEPS)], "a snapshot that was loaded may not be in storage yet"


@pytest.mark.parametrize("moment", ["data wait", "forward", "reduction"])
def test_stop_request_is_agreed_on_in_the_same_step(
    moment: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_trainer({"data": {"prefetch": 0}, "evaluation": {"interval": 3}})
    chunk = made.rank_model.data_parallel[0]
    places: dict[str, tuple[Any, str]] = {
        "data wait": (BatchReader, "read_step"),
        "forward": (made.rank_model.pipeline, "train"),
        "reduction": (chunk, "finish_reduce"),
    }
    owner, name = places[moment]
    call = getattr(owner, name)

    def ask_in_the_third(*arguments: Any, **options: Any) -> Any:
        found = call(*arguments, **options)
        if made.trainer.step == 2:
            made.stop.set()
        return found

    monkeypatch.setattr(owner, name, ask_in_the_third)
    made.run()

    assert made.trainer.is_stopped
    assert [report.step for report in made.reports.steps] == [1, 2, 3]
    assert made.noted("take", "wait") == [("take", 3), ("wait", 3)]
    assert made.reports.evaluations == []
    assert made.reports.texts[-1] == "the evaluation after step 3 is left out, because the run stops there"


def test_stop_request_in_an_evaluation_takes_one_step(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_trainer({"evaluation": {"interval": 2}})
    call = evaluation_module.evaluate

    def ask(*arguments: Any) -> Any:
        made.stop.set()
        return call(*arguments)

    monkeypatch.setattr(evaluation_module, "evaluate", ask)
    made.run()

    assert [report.step for report in made.reports.steps] == [1, 2, 3]
    assert made.noted("take") == [("take", 3)]
    assert not any("left out" in text for text in made.reports.texts)


def test_sources_without_losses_of_samples_are_not_reported(make_trainer: MakeTrainer) -> None:
    """The run had two sources before, so its batches name them; the configuration has one, so the model sums losses."""
    made = make_trainer()
    one = made.checkpoints.stream
    gone = StreamSource("gone", 500, "a" * 32)
    made.checkpoints.stream = replace(one, sources=(gone, *one.sources), stages=(MixtureStage(0, (0, 1), 16),))
    made.run()

    assert [report.sources for report in made.reports.steps] == [()] * STEPS


def test_checkpoints_by_time_are_limited_by_their_cost(make_trainer: MakeTrainer) -> None:
    made = make_trainer({"checkpoint": {"interval_s": 0.001}})
    made.run()

    # A millisecond has passed after the first step; a snapshot that costs 0.25 s must not be repeated within 12.5 s.
    assert made.noted("take") == [("take", 1)]
    assert made.recorder.progress().save_interval_ns == 12.5e9


def test_no_checkpoint_by_time_is_taken_of_a_skipped_step(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_trainer({"checkpoint": {"interval_s": 0.001}})
    add_to_losses(made.rank_model, monkeypatch, lambda: float("nan") if made.trainer.step < 2 else 0.0)
    made.run()

    assert made.noted("take") == [("take", 3)]
