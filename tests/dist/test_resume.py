"""A run that is stopped, saved and resumed, with the same layout or another, equals a run without the stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.local_location import LocalLocation
from tests.dist.training_jobs import (
    SHALLOW,
    Run,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_states_bitwise,
    distance,
)
from tests.helpers.training_case import CaseOrders, make_config, on_layout
from tests.helpers.waiting import wait_until

Sizes = tuple[int, int, int, int]

STEPS, HALF = 3, 2
GLOBAL_BATCH_SIZE = 8
PAIRS: list[tuple[Sizes, Sizes]] = [
    ((1, 1, 1, 1), (2, 2, 2, 2)),
    ((2, 2, 2, 2), (1, 1, 1, 1)),
    ((2, 2, 2, 1), (4, 1, 2, 1)),
    ((8, 1, 1, 1), (1, 2, 4, 2)),
    ((1, 1, 8, 1), (2, 4, 1, 1)),
    ((1, 4, 2, 1), (2, 2, 1, 2)),
    ((4, 2, 1, 2), (1, 1, 4, 1)),
    ((2, 4, 1, 1), (2, 2, 2, 1)),
]
OPTIMIZERS = [
    ("adamw", "fp64"),
    ("lamb", "fp64"),
    ("adamw", "fp64"),
    ("lamb", "fp64"),
    ("muon", "fp64"),
    ("adamw", "bf16"),
    ("sgd", "fp64"),
    ("lamb", "bf16"),
]
CASES = [(pair, *optimizer) for pair, optimizer in zip(PAIRS, OPTIMIZERS, strict=True)]


OF_OPTIMIZER = {
    "adamw": {"eps": 1e-4},
    "lamb": {"eps": 1e-4},
    "muon": {"eps": 1e-4, "ema_decay": 0.75},
    "sgd": {},
}


def pair_name(pair: tuple[Sizes, Sizes]) -> str:
    return "-to-".join("tp{}pp{}dp{}c{}".format(*sizes) for sizes in pair)


def stop_and_resume(
    jobs: TrainingJobs, common: Tables, run_directory: Path, first: Sizes, second: Sizes, changes: Tables | None = None
) -> tuple[Run, Run]:
    """Train on one layout until the last rank is requested to stop within step HALF; continue with another layout.
    changes: of the configuration of the second half."""
    place: Tables = {"job": {"run_directory": str(run_directory)}}
    last_rank = first[0] * first[1] * first[2] - 1
    before = jobs.run(make_config(common, place, on_layout(*first)), CaseOrders(stop_at=(last_rank, HALF - 1)))
    assert all(record.is_stopped for record in before.ranks)
    found = candidates(LocalLocation(run_directory / "checkpoints"))
    assert [(candidate.branch, candidate.step) for candidate in found] == [("main", HALF)]
    wait_until(lambda: not list(run_directory.glob("megatrain-arena*")), "no snapshot left in memory")
    after = jobs.run(make_config(common, place, on_layout(*second), changes or {}))
    assert [report.step for report in before.steps + after.steps] == list(range(1, STEPS + 1))
    return before, after


def assert_every_sample_is_trained_on_once(before: Run, after: Run) -> None:
    """Check the numbers of the samples that all pipelines read: each step has its own samples, in both halves."""
    # The prefetch thread of the stopped run may have read steps that the run did not reach.
    cursors = [step * GLOBAL_BATCH_SIZE for step in range(STEPS)]
    consumed = [before.samples_by_step()[cursor] for cursor in cursors[:HALF]]
    consumed += [after.samples_by_step()[cursor] for cursor in cursors[HALF:]]
    assert min(after.samples_by_step()) == cursors[HALF]
    assert consumed == [list(range(cursor, cursor + GLOBAL_BATCH_SIZE)) for cursor in cursors]


@pytest.mark.slow(kept=["tp2pp2dp2c2-to-tp1pp1dp1c1-lamb-fp64"])
@pytest.mark.parametrize(
    ("pair", "optimizer", "precision"), CASES, ids=lambda value: value if isinstance(value, str) else pair_name(value)
)
def test_resumed_at_another_layout_ends_as_one_process_does(
    pair: tuple[Sizes, Sizes], optimizer: str, precision: str, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    common: Tables = {
        **train_data,
        "model": {"dropout": 0.1},
        "train": {"steps": STEPS, "precision": precision},
        "optimizer": {"name": optimizer} | OF_OPTIMIZER[optimizer],
    }
    before, after = stop_and_resume(jobs, common, tmp_path, *pair)

    assert_states_bitwise(after.initial_state, before.final_state)
    assert_bitwise(after.initial, before.final)
    assert_every_sample_is_trained_on_once(before, after)
    assert {record.num_updates for record in after.ranks} == {STEPS}
    reference = jobs.remembered(make_config(common))
    if precision == "fp64":
        assert_close(before.losses, reference.losses[:HALF], 1e-10, "loss before")
        assert_close(before.grad_norms, reference.grad_norms[:HALF], 1e-10, "gradient norm before")
        assert_close(after.losses, reference.losses[HALF:], 1e-10, "loss after")
        assert_close(after.grad_norms, reference.grad_norms[HALF:], 1e-10, "gradient norm after")
        assert max(distance(after.final, reference.final).values()) <= 1e-10
        for kind, state in reference.final_state.items():
            assert max(distance(after.final_state[kind], state).values(), default=0.0) <= 1e-8, kind
    else:
        assert_close(after.losses, reference.losses[HALF:], 2.0**-13, "loss after")
    assert [report.lr for report in after.steps] == [report.lr for report in reference.steps[HALF:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision", "sizes"),
    [("adamw", "fp32", (1, 2, 2, 2)), ("lamb", "bf16", (2, 2, 1, 1)), ("muon", "bf16", (2, 1, 2, 1))],
    ids=["adamw-fp32", "lamb-bf16", "muon-bf16"],
)
def test_resumed_at_the_same_layout_continues_bitwise(
    optimizer: str, precision: str, sizes: Sizes, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    common: Tables = {
        **train_data,
        "model": {"dropout": 0.1},
        "train": {"steps": STEPS, "precision": precision},
        "optimizer": {"name": optimizer} | ({"ema_decay": 0.75} if optimizer == "muon" else {}),
    }
    before, after = stop_and_resume(jobs, common, tmp_path, sizes, sizes)
    straight = jobs.run(make_config(common, on_layout(*sizes)))

    assert before.losses + after.losses == straight.losses
    assert before.grad_norms + after.grad_norms == straight.grad_norms
    assert_states_bitwise(after.final_state, straight.final_state)
    assert_bitwise(after.final, straight.final)


@pytest.mark.slow
def test_resume_with_another_update_rule_begins_an_average(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    common: Tables = {**train_data, **SHALLOW, "train": {"steps": STEPS}}
    changes: Tables = {"optimizer": {"name": "muon", "ema_decay": 0.75}, "checkpoint": {"save_at_end": True}}
    before, after = stop_and_resume(jobs, common, tmp_path, (2, 1, 2, 1), (1, 2, 2, 1), changes)

    assert_bitwise(after.initial_state["master"], before.final_state["master"])
    assert_bitwise(after.initial_state["exp_avg"], before.final_state["exp_avg"])
    assert_bitwise(after.initial_state["ema"], before.final_state["master"])
    assert after.final_state["exp_avg_sq"].keys() < before.final_state["exp_avg_sq"].keys()
    assert any('optimizer.name: "adamw" -> "muon"' in note for note in after.ranks[0].notes)

    later: Tables = {**common, "train": {"steps": STEPS + 2}, "optimizer": {"name": "sgd"}}
    last = jobs.run(make_config(later, {"job": {"run_directory": str(tmp_path)}}, on_layout(1, 1, 1)))
    assert_bitwise(last.initial_state["master"], after.final_state["master"])
    assert not any(one.any() for one in last.initial_state["momentum"].values())


@pytest.mark.slow
def test_all_ranks_take_a_checkpoint_by_time_after_the_same_step(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    """One rank reads the clock: the others must receive its decision in that step, or they would not take the
    snapshot."""
    place: Tables = {"job": {"run_directory": str(tmp_path)}, "checkpoint": {"interval_s": 0.001, "keep_last": 0}}
    run = jobs.run(make_config(train_data, SHALLOW, place, {"train": {"steps": 4}}, on_layout(1, 2, 2)))
    assert [report.step for report in run.steps] == [1, 2, 3, 4]
    taken = [note for note in run.ranks[0].notes if note.startswith("snapshot of step ")]
    assert taken
    steps = committed_steps(LocalLocation(tmp_path / "checkpoints" / "main"))
    assert steps == [int(note.split()[3]) for note in taken]
