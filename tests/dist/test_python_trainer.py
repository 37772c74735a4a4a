"""`megatrain.Trainer` trains bit by bit as the command does, with callbacks, and with a custom loss."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

import megatrain
from megatrain.config.config import Config
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import Process
from megatrain.training.extensions import Extensions
from megatrain.training.worker import run_worker
from tests.dist.training_jobs import Tables
from tests.helpers.etcd_server import etcd_program
from tests.helpers.forked_program import run_forked
from tests.helpers.own_loss_program import summed_loss
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.train_command import run_command
from tests.helpers.train_process import TrainJob, finish, forked, make_job, started
from tests.helpers.training_case import on_layout

Loss = Callable[[Tensor, Tensor], Tensor]
STEPS = 4
TABLES: Tables = {
    "model": {"num_layers": 2, "dropout": 0.1},
    "batch": {"global_batch_size": 4},
    "train": {"steps": STEPS},
    "evaluation": {"interval": 3},
    "checkpoint": {"interval": 2},
}
"""In fp64, where two ways to compute one loss differ only by negligible rounding."""
LAYOUTS: dict[str, Tables] = {
    "tp2": on_layout(2, 1, 1),
    "tp2-pp2-dp2": on_layout(2, 2, 2),
    "pp2-dp2-chunks2": {**on_layout(1, 2, 2, 2), "batch": {"micro_batch_size": 1}},
}


class Notes(megatrain.Callback):
    """Records the calls in order. stop_at: the step after which this process gets SIGTERM."""

    def __init__(self, stop_at: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._stop_at = stop_at

    def on_start(self, config: Config, rank: int, step: int) -> None:
        self.calls.append(("start", config.train.steps, rank, step))

    def on_step(self, report: megatrain.StepReport) -> None:
        self.calls.append(("step", report.step, report.loss, report.grad_norm))
        if report.step == self._stop_at:
            signal.raise_signal(signal.SIGTERM)

    def on_checkpoint(self, step: int) -> None:
        self.calls.append(("checkpoint", step))

    def on_evaluation(self, report: megatrain.EvaluationReport) -> None:
        self.calls.append(("evaluation", report.step, report.loss))

    def on_end(self, step: int, is_stopped: bool) -> None:
        self.calls.append(("end", step, is_stopped))


def train_in_program(
    context: RankContext, config: Config, loss: Loss | None, stop_at: int
) -> tuple[ExitCode, list[Any], bool]:
    """Train on the pool; return the exit code, the notes, and whether the process has its former signal handlers
    again."""
    notes, before = Notes(stop_at), signal.getsignal(signal.SIGTERM)
    with redirect_stdout(sys.stderr):
        code = megatrain.Trainer(config, callbacks=[notes], loss=loss).run()
    return code, notes.calls, signal.getsignal(signal.SIGTERM) is before


def work_on_rank(context: RankContext, config: Config, loss: Loss) -> list[Any]:
    """Run as one of several workers on the pool, and return the notes."""
    rank, world_size = context.rank, context.world_size
    notes, signals = Notes(), SimpleNamespace(is_requested=False, name="")
    watchdog = SimpleNamespace(extend=lambda seconds: None, follow=lambda path: None)
    process = Process(rank, world_size, rank, world_size, 0, context.init_method)
    with redirect_stdout(sys.stderr):
        run_worker(config, process, signals, watchdog, Extensions((notes,), loss))  # type: ignore[arg-type]
    return notes.calls


def doubled_loss(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    assert logits_TV.shape[1] == 90, "the columns that pad the vocabulary are not the user's"
    return 2 * summed_loss(logits_TV, labels_T)


def focal_loss(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Weight each token by its prediction error. Needs all columns of a row, unlike a sum over columns."""
    assert logits_TV.shape[1] == 90, "the columns of all ranks, without padding"
    loss_T = functional.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="none")
    return ((1 - (-loss_T).exp()) ** 2 * loss_T).sum()


def numbers(job: TrainJob, kind: str, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in ("step", *names)) for record in job.records(kind)]


@pytest.fixture(scope="module")
def command(all_data: Tables, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A run of `megatrain train`."""
    root = tmp_path_factory.mktemp("command")
    job = make_job(root / "job", all_data, TABLES)
    assert run_command(rank_pool, ["train", str(job.config_file)], root / "output.txt") == 0
    return job


def test_trainer_equals_the_command_and_calls_back(
    command: TrainJob, all_data: Tables, rank_pool: RankPool, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "job", all_data, TABLES)
    ((code, calls, is_restored),) = rank_pool.run(train_in_program, 1, job.config, None, 0)

    steps, evaluations = numbers(command, "step", "loss", "grad_norm"), numbers(command, "evaluation", "loss")
    assert len(steps) == STEPS
    assert numbers(job, "step", "loss", "grad_norm") == steps
    assert numbers(job, "evaluation", "loss") == evaluations
    first, second, third, fourth = (("step", *values) for values in steps)
    assert calls == [
        ("start", STEPS, 0, 0),
        first,
        second,
        ("checkpoint", 2),
        third,
        ("evaluation", *evaluations[0]),
        fourth,
        ("checkpoint", STEPS),
        ("evaluation", *evaluations[1]),
        ("end", STEPS, False),
    ]
    assert code is ExitCode.OK
    assert is_restored


def test_custom_loss_replaces_cross_entropy_in_training_only(
    command: TrainJob, all_data: Tables, rank_pool: RankPool, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "job", all_data, TABLES)
    rank_pool.run(train_in_program, 1, job.config, doubled_loss, 0)

    # Gradients are clipped to one norm, so doubling the loss does not change them.
    assert min(norm for _, norm in numbers(command, "step", "grad_norm")) > command.config.optimizer.grad_clip
    expected = [(step, pytest.approx(2 * loss, rel=1e-6)) for step, loss in numbers(command, "step", "loss")]
    assert numbers(job, "step", "loss") == expected
    evaluations = [(step, pytest.approx(loss, rel=1e-6)) for step, loss in numbers(command, "evaluation", "loss")]
    assert numbers(job, "evaluation", "loss") == evaluations


@pytest.mark.slow(kept=["tp2"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_custom_loss_is_the_same_in_every_layout(
    layout: Tables, all_data: Tables, rank_pool: RankPool, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "job", all_data, TABLES, layout, {"model": {"num_layers": 4}})
    plain = make_job(tmp_path / "plain", all_data, TABLES, {"model": {"num_layers": 4}})
    by_rank = rank_pool.run(work_on_rank, job.config.layout(None).world_size, job.config, focal_loss)
    rank_pool.run(train_in_program, 1, plain.config, focal_loss, 0)

    for kind, names in (("step", ["loss", "grad_norm"]), ("evaluation", ["loss"])):
        expected = [pytest.approx(values, rel=1e-9) for values in numbers(plain, kind, *names)]
        assert numbers(job, kind, *names) == expected
    for rank, calls in enumerate(by_rank):
        assert calls[0] == ("start", STEPS, rank, 0)
        assert calls[1:] == by_rank[0][1:], "every rank has the same numbers"


@pytest.mark.slow
def test_signal_saves_and_the_next_run_continues(
    command: TrainJob, all_data: Tables, rank_pool: RankPool, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "job", all_data, TABLES)
    ((code, calls, is_restored),) = rank_pool.run(train_in_program, 1, job.config, None, 2)
    assert (code, calls[-1], is_restored) == (ExitCode.SAVED_AND_STOPPED, ("end", 3, True), True)

    ((code, calls, _),) = rank_pool.run(train_in_program, 1, job.config, None, 0)
    assert (code, calls[0]) == (ExitCode.OK, ("start", STEPS, 0, 3))
    assert numbers(job, "step", "loss", "grad_norm") == numbers(command, "step", "loss", "grad_norm")


def test_a_program_ends_with_the_exit_code_of_its_error() -> None:
    program = "import megatrain; megatrain.Trainer({'model': {'color': 1}}).run_as_program()"
    done = run_forked(["-c", program])

    assert done.returncode == ExitCode.CONFIG
    assert "megatrain: error: the configuration has " in done.stderr
    assert "model.color=1 is not a known key" in done.stderr
    assert "Traceback" not in done.stderr


def launched(words: list[str], job: TrainJob, tmp_path: Path) -> str:
    """Run a launcher to its end, and return its output and that of its workers."""
    output = tmp_path / "output.txt"
    with started([*words, "-m", "tests.helpers.own_loss_program", str(job.config_file)], output=output) as process:
        code, _, _ = finish(process)
    text = output.read_text()
    assert code == 0, text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "megatrain launch"])
def test_workers_of_a_launcher_run_the_users_program(
    launcher: str, all_data: Tables, rank_pool: RankPool, tmp_path: Path
) -> None:
    tables = (all_data, TABLES, {"parallel": {"dp_size": 2}, "recovery": {"has_health_checks": False}})
    job, plain = make_job(tmp_path / "job", *tables), make_job(tmp_path / "plain", all_data, TABLES)
    rank_pool.run(train_in_program, 1, plain.config, None, 0)
    if launcher == "torchrun":
        text = launched(["torch.distributed.run", "--standalone", "--nproc-per-node=2"], job, tmp_path)
    else:
        etcd_program()
        words = ["megatrain", "launch", "--standalone", "--no-daemon", "--nproc-per-node=2", "--tee=all"]
        text = launched(words, job, tmp_path)

    for rank in range(2):
        assert f"rank {rank} has done step {STEPS}" in text
    expected = [(step, pytest.approx(loss, rel=1e-9)) for step, loss in numbers(plain, "step", "loss")]
    assert numbers(job, "step", "loss") == expected


@pytest.mark.slow
def test_a_worker_of_a_launcher_ends_with_the_code_of_its_error(all_data: Tables, tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", all_data, TABLES, {"train": {"z_loss": 1e-3}})
    with forked(["tests.helpers.own_loss_program", str(job.config_file)]) as process:
        code, _, stderr = finish(process)

    assert code == ExitCode.CONFIG
    assert "train.z_loss=0.001 with a loss of your own: z_loss is a term of the built-in loss" in stderr
