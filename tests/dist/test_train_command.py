"""The command under torchrun, with real processes: signals, exit codes and the files that remain."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.exit_codes import ExitCode
from megatrain.run_files.run_directory import own_box_paths
from megatrain.run_files.run_lock import checkpoints_locked
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.forked_program import ForkedProgram
from tests.helpers.train_process import TrainJob, finish, forked, make_job, started
from tests.helpers.training_case import make_config, on_layout
from tests.helpers.waiting import wait_until

STEPS = 24
"""More than a second of training: long enough for a signal to arrive in the middle."""
GLOBAL_BATCH_SIZE = 4
SIGNALED_RANK = 2


def torchrun(config_file: Path) -> list[str]:
    return ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "megatrain.train", str(config_file)]


def worker_exit_codes(torchrun_stderr: str) -> dict[int, int]:
    """Return the exit code of each failed worker, from torchrun's summary."""
    found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+) ", torchrun_stderr)
    return {int(rank): int(code) for rank, code in found}


@pytest.mark.slow
def test_stopped_and_resumed_run_equals_an_undisturbed_one(
    jobs: TrainingJobs, all_data: Tables, tmp_path: Path
) -> None:
    tables: tuple[Tables, ...] = (
        all_data,
        on_layout(2, 2, 1),
        {"parallel": {"num_sequence_chunks": 2}},
        {"train": {"steps": STEPS, "precision": "fp32"}},
        {"model": {"num_layers": 2}, "batch": {"global_batch_size": GLOBAL_BATCH_SIZE}},
    )
    straight = jobs.run(make_config(*tables))
    job = make_job(tmp_path, *tables, {"checkpoint": {"save_at_end": True}})

    with started(torchrun(job.config_file)) as process:
        wait_until(lambda: len(job.records("step")) >= 3 or process.poll() is not None, "three steps")
        identities = [read_black_box(box).identity for box in job.boxes]
        (pid,) = (identity.pid for identity in identities if identity.rank == SIGNALED_RANK)
        os.kill(pid, signal.SIGTERM)
        _, stdout, stderr = finish(process)
    codes = worker_exit_codes(stderr)
    assert sorted(codes) == [0, 1, 2, 3], stderr
    assert int(ExitCode.SAVED_AND_STOPPED) in codes.values()
    # torchrun sends SIGTERM to the other workers when the first one has ended, possibly during their last instructions.
    assert set(codes.values()) <= {int(ExitCode.SAVED_AND_STOPPED), -signal.SIGTERM}
    main = LocalLocation(job.files.checkpoints / "main")
    (saved,) = committed_steps(main)
    assert [record["step"] for record in job.records("step")] == list(range(1, saved + 1))
    assert saved < STEPS
    assert read_manifest(main / step_directory_name(saved)).consumed_samples == saved * GLOBAL_BATCH_SIZE
    assert f"stopped at step {saved} by a signal to another worker" in stdout
    assert job.records("evaluation") == []
    assert job.boxes == []

    # the workers of torchrun's second start, which the test starts itself: torchrun's own start is tested above
    with four_workers(job) as workers:
        ends = [finish(worker) for worker in workers]
    assert [code for code, _, _ in ends] == [0, 0, 0, 0], ends
    stdout = ends[0][1]
    assert f"resumed at step {saved} from " in stdout
    assert f"step {STEPS}/{STEPS} | loss" in stdout
    # Bit by bit, because JSON keeps every digit.
    assert [record["loss"] for record in job.records("step")] == straight.losses
    assert [record["grad_norm"] for record in job.records("step")] == straight.grad_norms
    assert [(record["step"], record["loss"]) for record in job.records("evaluation")] == [
        (STEPS, straight.evaluation.loss)
    ]
    assert committed_steps(main) == [saved, STEPS]
    assert job.boxes == []


def worker_environment(local_rank: int, store_port: int = 1) -> dict[str, str]:
    """Return torchrun's variables for one of 4 workers; by default, no process listens at the store's port."""
    return {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def four_workers(job: TrainJob) -> Iterator[list[ForkedProgram]]:
    """Start the workers that torchrun would start, with this process as the agent that serves the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                forked(["megatrain.train", str(job.config_file)], worker_environment(local_rank, store.port))
            )
            for local_rank in range(4)
        ]


def bad_config(root: Path, train_data: Tables) -> Path:
    job = make_job(root, train_data, on_layout(2, 2, 1))
    text = job.config_file.read_text()
    text = text.replace("tp_size = 2", "tp_size = 3").replace("hidden_size = 32", 'hidden_size = 32\ncolor = "blue"')
    job.config_file.write_text(text)
    return job.config_file


PROBLEMS = (
    "model.color",
    "parallel.tp_size=3 must divide model.num_heads=8",
    "1 * 2 * 3 = 6 must equal the world size of 4",
)


@pytest.mark.slow
def test_bad_configuration_is_reported_once_for_all_workers(train_data: Tables, tmp_path: Path) -> None:
    with forked(torchrun(bad_config(tmp_path / "job", train_data))) as process:
        code, stdout, stderr = finish(process)

    assert code != 0
    assert set(worker_exit_codes(stderr).values()) <= {int(ExitCode.CONFIG), -signal.SIGTERM}
    assert int(ExitCode.CONFIG) in worker_exit_codes(stderr).values()
    for problem in PROBLEMS:
        assert (stdout + stderr).count(problem) == 1, stderr
    assert not (tmp_path / "job" / "run").exists()


@pytest.mark.slow(kept=["0"])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_bad_configuration_is_found_before_any_process_group(
    local_rank: int, train_data: Tables, tmp_path: Path
) -> None:
    config_file = bad_config(tmp_path / "job", train_data)
    # The store could not be reached: a worker that tried would fail in another way. A later worker waits for the first
    # one.
    program = "megatrain.train" if local_rank == 0 else "tests.helpers.short_wait_train"
    with started([program, str(config_file)], worker_environment(local_rank)) as process:
        code, stdout, stderr = finish(process)

    # A later worker with its own error reports it too, if no other worker does.
    assert code == ExitCode.CONFIG
    assert [(stdout + stderr).count(problem) for problem in PROBLEMS] == [1] * len(PROBLEMS)
    assert own_box_paths(tmp_path / "job" / "boxes") == []


def test_truncated_tokens_are_found_before_the_ranks_meet(train_data: Tables, tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    for ending in (".bin", ".idx"):
        Path(f"{prefix}{ending}").write_bytes(Path(train_data["data"]["train"] + ending).read_bytes())
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.truncate(7001)
    job = make_job(tmp_path / "job", {"data": {"train": str(prefix)}}, on_layout(2, 2, 1))

    with forked(["megatrain.train", str(job.config_file)], worker_environment(0)) as process:
        code, _, stderr = finish(process)

    assert code == ExitCode.DATA
    assert f"{prefix}.bin: the tokens that {prefix}.idx lists takes 8000 bytes, found 7001" in stderr
    assert "Traceback" not in stderr


def test_two_runs_do_not_save_in_one_place(train_data: Tables, tmp_path: Path) -> None:
    """Each has its own run directory, but both name the same checkpoint.directory."""
    place = tmp_path / "checkpoints"
    job = make_job(tmp_path / "job", train_data, {"checkpoint": {"directory": str(place)}})
    with checkpoints_locked(str(place)), forked(["megatrain.train", str(job.config_file)]) as process:
        code, _, stderr = finish(process)
    assert code == ExitCode.CONFIG
    assert f"checkpoint.directory='{place}': process {os.getpid()} on " in stderr
    assert "Traceback" not in stderr


def test_incomplete_checkpoints_are_an_error_in_the_black_box(train_data: Tables, tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", train_data)
    junk = job.files.checkpoints / "main" / "step-000000004"
    junk.mkdir(parents=True)
    (junk / "manifest.json").write_text("{")

    with forked(["megatrain.train", str(job.config_file)]) as process:
        code, _, stderr = finish(process)

    assert code == ExitCode.CHECKPOINT
    assert f"{job.files.checkpoints}: holds main/step-000000004, but no committed checkpoint" in stderr
    assert "Traceback" not in stderr
    assert list(junk.iterdir()) == [junk / "manifest.json"]
    (box,) = job.boxes
    with started(["megatrain", "blackbox", str(box)]) as process:
        code, stdout, _ = finish(process)
    assert code == 0
    assert re.search(r"^process +\d+ on .*, failed$", stdout, re.MULTILINE), stdout
    assert re.search(r"^ *[\d.]+ +-1 +init ", stdout, re.MULTILINE), stdout
