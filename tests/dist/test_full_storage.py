"""Full or unwritable storage with the real command: training continues, and saves as soon as possible."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.checkpoint.verification import verify_checkpoint
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.exit_codes import ExitCode
from tests.dist.restarts import kill_writers, remove_memory, steps_that_are_whole, the_arena
from tests.dist.training_jobs import Tables
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.helpers.train_process import TrainJob, TrainProcess, finish, forked, make_job
from tests.helpers.waiting import wait_until

FAILED = "a checkpoint FAILED and is tried again at the next interval: step"
STORED = r" is in storage \(this host: "
FULL = r"\.distcp: cannot be written: No space left on device"
INTERVAL = 20
ENDLESS: Tables = {
    "train": {"steps": 1_000_000},
    "model": {"num_layers": 1},
    "batch": {"micro_batch_size": 4, "global_batch_size": 4},
    "checkpoint": {"interval": INTERVAL, "keep_last": 2, "save_at_end": True},
}


class Said:
    """The output of a process, read piece by piece."""

    def __init__(self, process: TrainProcess, path: Path) -> None:
        self._process = process
        self._path = path
        self._at = 0

    def next(self, what: str, meanwhile: Callable[[], object] = lambda: None) -> str:
        """Wait for a line that matches the expression `what`, after all lines that were waited for before, and return
        it."""
        found: list[str] = []

        def is_said() -> bool:
            meanwhile()
            text = self._path.read_text()
            match = re.compile(f"^.*{what}.*\n", re.MULTILINE).search(text, self._at)
            assert match or self._process.poll() is None, text
            if match:
                self._at = match.end()
                found.append(match[0].rstrip())
            return bool(match)

        wait_until(is_said, what)
        return found[0]


def stop(process: TrainProcess) -> int:
    process.send_signal(signal.SIGTERM)
    return finish(process)[0]


def is_tidy(main: Path) -> bool:
    """Return whether everything older than the newest checkpoint was either kept or removed completely."""
    steps = committed_steps(LocalLocation(main))
    names = {step_directory_name(step) for step in steps}
    return len(steps) <= 2 and all(path.name in names or path.name > max(names) for path in main.glob("step-*"))


@pytest.mark.slow
def test_training_survives_a_full_disk(train_data: Tables, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 128 << 10) as disk:
        run = disk.path / "run"
        tables: Tables = {
            # Logs and metrics are on the same disk.
            "job": {"run_directory": str(run)},
            "checkpoint": {**ENDLESS["checkpoint"], "arena_directory": str(tmp_path), "keep_arena_s": 0.0},
        }
        job = make_job(tmp_path / "job", train_data, ENDLESS, tables)
        newest = train_on_a_full_disk(job, disk, tmp_path)
        assert newest > 0, "the steps stored before storage was full"
        go_on_from_what_it_left(job, disk, tmp_path, newest)


def train_on_a_full_disk(job: TrainJob, disk: SmallDisk, directory: Path) -> int:
    """Train until the disk is full, then be killed; return the step that storage has then."""
    checkpoints, output = disk.seen / "run" / "checkpoints", directory / "first.txt"
    with forked(["megatrain.train", str(job.config_file)], output=output, prepare=[disk.join]) as process:
        said = Said(process, output)
        # Not even one checkpoint fits, nor does the next one.
        for _ in range(2):
            assert re.search(FULL, said.next(FAILED))
        assert steps_that_are_whole(checkpoints) == []
        # Some space is freed.
        disk.resize(16 << 20)
        said.next(STORED)
        wait_until(lambda: is_tidy(checkpoints / "main"), "no files of the failed checkpoints")
        # The disk is full again.
        for _ in range(2):
            said.next(FAILED, disk.fill)
        steps = steps_that_are_whole(checkpoints)
        assert steps
        # as if the host went down
        arena = the_arena(directory)
        process.kill()
        process.wait()
        kill_writers(arena)
        remove_memory(arena)
    disk.fill()
    return steps[-1]


def go_on_from_what_it_left(job: TrainJob, disk: SmallDisk, directory: Path, step: int) -> None:
    checkpoints, output = disk.seen / "run" / "checkpoints", directory / "second.txt"
    with forked(["megatrain.train", str(job.config_file)], output=output, prepare=[disk.join]) as process:
        said = Said(process, output)
        said.next(f"resumed at step {step} from {disk.path}/run/checkpoints/main/{step_directory_name(step)} ")
        said.next(FAILED)
        disk.free_space()
        said.next(STORED)
        assert stop(process) == ExitCode.SAVED_AND_STOPPED
    assert steps_that_are_whole(checkpoints)[-1] > step

    def holds_whole_steps_only() -> bool:
        names = sorted(path.name for path in (checkpoints / "main").iterdir())
        return names == ["BRANCH", *map(step_directory_name, steps_that_are_whole(checkpoints))]

    # The writer runs a moment longer than its job.
    wait_until(holds_whole_steps_only, "no remains")


@pytest.mark.slow
def test_training_survives_an_unwritable_directory(train_data: Tables, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o555)
    tables: Tables = {
        "checkpoint": {**ENDLESS["checkpoint"], "directory": str(store), "arena_directory": str(tmp_path)}
    }
    job, main = make_job(tmp_path / "job", train_data, ENDLESS, tables), store / "main"
    words = ["megatrain.train", str(job.config_file)]

    # A run that could never save is not started.
    with forked(words) as process:
        code, _, stderr = finish(process)
    assert code == ExitCode.CHECKPOINT
    assert f"{main}/BRANCH: cannot be written: Permission denied" in stderr
    assert "Traceback" not in stderr

    # A run that exists already continues, and reports the problem.
    store.chmod(0o755)
    with forked(words, output=tmp_path / "first.txt") as process:
        said = Said(process, tmp_path / "first.txt")
        said.next(STORED)
        main.chmod(0o555)
        assert "Permission denied" in said.next(FAILED)
        main.chmod(0o755)
        said.next(STORED)
        assert stop(process) == ExitCode.SAVED_AND_STOPPED
    (*_, step) = steps_that_are_whole(store)

    # The same for a run that starts again; it reports the problem before the first checkpoint is due.
    main.chmod(0o555)
    with forked(words, output=tmp_path / "second.txt") as process:
        said = Said(process, tmp_path / "second.txt")
        said.next(f"WARNING: {main} cannot be written, so no checkpoint will reach storage")
        said.next(f"resumed at step {step} from")
        said.next(FAILED)
        main.chmod(0o755)
        said.next(STORED)
        assert stop(process) == ExitCode.SAVED_AND_STOPPED

    def holds_whole_steps_only() -> bool:
        return all(verify_checkpoint(LocalLocation(path)) == [] for path in main.glob("step-*"))

    # The writer runs a moment longer than its job.
    wait_until(holds_whole_steps_only, "no remains")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("corrupt", "box", "arena"),
    [
        (SmallDisk.make_read_only, "Read-only file system", "the arena cannot be created: Read-only file system"),
        (SmallDisk.fill, "0 bytes are free", "but only 0 B are free; use checkpoint.slots=1"),
        (lambda disk: None, "", "and 67.1 MB must stay free, but only"),
    ],
    ids=["read-only", "full", "64 MB"],
)
def test_unusable_shared_memory_is_named_at_the_start(
    train_data: Tables, tmp_path: Path, corrupt: Callable[[SmallDisk], None], box: str, arena: str
) -> None:
    """Without its black box, a run continues; without its arena, it could not save as configured."""
    with small_disk(tmp_path / "shm", 64 << 20) as disk:
        corrupt(disk)
        boxes: Tables = {"telemetry": {"black_box_directory": str(disk.path)}, "train": {"steps": 3}}
        elsewhere: Tables = {"checkpoint": {"arena_directory": str(tmp_path)}}
        there: Tables = {"checkpoint": {"arena_directory": str(disk.path)}}
        for place, is_begun in ((elsewhere, True), (there, False)):
            job = make_job(tmp_path / f"job-{is_begun}", train_data, ENDLESS, boxes, place)
            with forked(["megatrain.train", str(job.config_file)], prepare=[disk.join]) as process:
                code, stdout, stderr = finish(process)
            said = stdout + stderr
            assert "Traceback" not in said
            assert (code == ExitCode.OK) is is_begun, said
            assert said.count("no black box for rank 0") == (box != "")
            assert box in said
            assert is_begun or arena in said, said
