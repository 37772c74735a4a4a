"""A run of the GPU benchmark without a GPU: its stages, its processes, and their faults."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import csrc.build
from benchmarks import gpu, gpu_operator_stages, gpu_step_stages
from benchmarks.gpu_record import GpuRecord, GpuStage
from benchmarks.gpu_stage import run_stage
from tests.helpers.forked_program import forked_program
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of the benchmark: a dozen processes, each of which would import torch."""

    def run(
        command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> tuple[int | None, str]:
        assert command[0] == sys.executable
        options = {"environment": {**os.environ, **(environment or {})}}
        with tempfile.TemporaryFile() as log, forked_program(command[1:], output=log, **options) as program:
            with suppress(subprocess.TimeoutExpired):
                program.wait(timeout_s)
            log.seek(0)
            return program.returncode, log.read().decode()

    monkeypatch.setattr(gpu, "run_command", run)


def test_no_stage_measures_without_kernels(record: GpuRecord, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    called: list[str] = []
    stages = {name: lambda stage, target, name=name: called.append(name) for name in ("Ceilings", "Whole steps")}
    for name in stages:
        run_stage(stages, [name, "--output", str(tmp_path)], without_kernels=["Ceilings"])

    assert called == ["Ceilings"]
    found = GpuRecord.read(tmp_path)
    assert [found.stage(name).content["is_done"] for name in stages] == [True, True]
    (reason,) = found.stage("Whole steps").content["failed"]
    assert reason.startswith("not measured, there are no compiled kernels: ")


KERNELS_STAND_IN = '''
import sys
from importlib.machinery import PathFinder
import torch
from tests.helpers.waiting import DEADLINE_S


class Kernels:
    """Finds no kernels but the test's: the tree may have some that were built in earnest."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "megatrain._C":
            return None
        found = PathFinder.find_spec(name, [{directory!r}])
        if found is None:
            raise ModuleNotFoundError(name)
        return found


sys.meta_path.insert(0, Kernels)
torch.version.cuda = "13.0"
torch.cuda.get_device_capability = lambda: (9, 0)
from benchmarks import gpu_stage
gpu_stage.load_extension.cache_clear()  # a fork may have its server's answer
gpu_stage.set_allocator = lambda settings: None
stages = dict.fromkeys(["Before", "Timing"], lambda stage, target: stage.change(found={{"ours": 1.0}}))
sys.exit(gpu_stage.run_stage(stages))
'''


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize("architecture", ["9.0a", "8.0", None])
def test_timed_kernels_are_those_just_built(
    architecture: str | None, record: GpuRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timing_stand_in.py").write_text(KERNELS_STAND_IN.format(directory=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def build(stage: GpuStage, timeout_s: float) -> None:
        if architecture is None:
            raise RuntimeError("no nvcc")
        (tmp_path / "_C.py").write_text(f'architectures, has_current_stream = "{architecture}", True\n')

    before, timing = (partial(gpu.run_in_child, tmp_path, "timing_stand_in", name) for name in ("Before", "Timing"))
    gpu.run_all({"Before": before, gpu.BUILD: build, "Timing": timing}, tmp_path, budget_s=50.0)

    assert "was not built" in "".join(GpuRecord.read(tmp_path).stage("Before").content["failed"])
    found = GpuRecord.read(tmp_path).stage("Timing").content
    assert found["found"] == ({"ours": 1.0} if architecture == "9.0a" else [])
    refusal = "" if architecture == "9.0a" else "not started" if architecture is None else "compute capability 8.0"
    assert refusal in "".join(found["failed"])
    assert bool(found["failed"]) == bool(refusal)


def test_the_process_that_builds_has_asked_for_no_kernels() -> None:
    code = "import sys, benchmarks.gpu; print([one for one in sys.modules if one.startswith('megatrain')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_stage_that_is_asked_for_is_there(tmp_path: Path) -> None:
    runs = [run for run in gpu.stages(tmp_path).values() if isinstance(run, partial)]
    asked = {run.args[1:] for run in runs if run.func is gpu.run_in_child}
    there = {
        (f"benchmarks.{module}", name)
        for module, names in (
            ("gpu_operator_stages", gpu_operator_stages.STAGES),
            ("gpu_step_stages", gpu_step_stages.STAGES),
        )
        for name in names
    }
    assert asked == there


CRASHING_STAGE = """
import os, signal, sys
from pathlib import Path
from benchmarks.gpu_record import GpuRecord
from benchmarks.gpu_stage import fill
import benchmarks.gpu_stage as gpu_stage
gpu_stage.release = lambda: None
gpu_stage.is_device_usable = lambda: True
stage = GpuRecord.read(Path(sys.argv[3])).stage(sys.argv[1])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
for name, work in (("a", lambda: 1.0), ("b", die), ("c", lambda: 3.0)):
    fill(stage, stage.row(side=name), "seconds", work, is_ours=True)
if sys.argv[1] == "Broken":
    raise RuntimeError("in between")
stage.change(is_done=True)
"""


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize(
    ("name", "failures"), [("Whole", ["the process ended"]), ("Broken", ["process ended", "in between"])]
)
def test_a_stage_goes_on_behind_what_a_process_did_not_survive(
    name: str, failures: list[str], record: GpuRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_stage.py").write_text(CRASHING_STAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    gpu.run_in_child(tmp_path, "crashing_stage", name, record.stage(name), 50.0)

    content = GpuRecord.read(tmp_path).stage(name).content
    lost = "the process ended during this measurement"
    assert [row["seconds"] for row in content["found"]] == [1.0, lost, 3.0]
    assert len(content["failed"]) == len(failures)
    assert all(part in reason for part, reason in zip(failures, content["failed"], strict=True))


def test_stages_share_the_time_left_and_late_ones_are_skipped(
    record: GpuRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    given: list[float] = []

    def run(stage: GpuStage, timeout_s: float) -> None:
        given.append(timeout_s)
        clock[0] += 40.0
        raise ValueError("broken")

    gpu.run_all(dict.fromkeys("abcd", run), tmp_path, budget_s=100.0)

    assert given == [100.0, 60.0, 20.0]
    stages = GpuRecord.read(tmp_path).document["stages"]
    assert [stages[name]["failed"] for name in "abcd"] == [["ValueError: broken"]] * 3 + [[]]
    assert stages["d"]["note"] == "not started: no time was left"
    assert stages["a"]["seconds"] == 40.0


def test_command_beyond_its_time_ends_with_its_children(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    command = ["sh", "-c", f"echo begun; exec 3>{held}; sleep {10 * DEADLINE_S:g} & wait"]
    for limit_s in (1.0, DEADLINE_S):
        found, log = gpu.run_command(command, limit_s)
        if log:  # On a busy machine the command may not have begun within a second.
            break

    assert (found, log) == (None, "begun\n")
    # readable when no process holds the other end any more
    assert select.select([reader], [], [], DEADLINE_S)[0] == [reader]
    os.close(reader)


@pytest.mark.parametrize(("capability", "architecture"), [((9, 0), "9.0a"), ((8, 9), "8.9")])
@pytest.mark.parametrize(("code", "failures"), [(0, []), (1, ["nvcc failed"]), (None, ["not built after 50 s"])])
def test_kernels_are_built_for_the_gpu_at_hand(
    capability: tuple[int, int],
    architecture: str,
    code: int | None,
    failures: list[str],
    record: GpuRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[tuple[Path, Any]] = []
    monkeypatch.setattr(csrc.build, "build", lambda output, architectures, jobs: built.append((output, architectures)))

    def run(command: list[str], timeout_s: float) -> tuple[int | None, str]:
        assert (command[:2], timeout_s) == ([sys.executable, "csrc/build.py"], 50.0)
        csrc.build.main(command[2:])
        return code, "nvcc failed"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(gpu, "run_command", run)
    stage = record.stage("Build")
    gpu.build(stage, 50.0)

    assert built == [(Path("megatrain/_C.abi3.so"), (architecture,))]
    assert stage.content["failed"] == failures


def run_stand_in(code: int | None, log: str) -> Callable[..., tuple[int | None, str]]:
    return lambda *_: (code, log)


@pytest.mark.parametrize(
    ("code", "log", "failure"),
    [
        (0, "...\nSKIPPED [1] x: no transformers\n910 passed, 1 skipped in 72.10s (0:01:12)\na late warning\n", None),
        (1, "FAILED tests/unit/ops/test_x.py::test_y - assert\n1 failed, 3 passed in 1.20s\n", "FAILED tests/unit/ops"),
        (4, "ERROR: usage\n", "ERROR: usage|exit code 4"),
        (5, "no tests ran in 0.01s\n", "exit code 5"),
        (0, "3 skipped in 0.10s\n", "exit code 0"),
        (-11, "... Fatal Python error\n", "exit code -11"),
        (None, "....", "stopped in the middle"),
    ],
)
def test_checks_that_do_not_all_pass_are_a_failure(
    code: int | None, log: str, failure: str | None, record: GpuRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "run_command", run_stand_in(code, log))
    stage = record.stage("Checks")
    gpu.check(["tests/unit/ops"], stage, 100.0)

    failed = "\n".join(stage.content["failed"])
    assert (failed == "") if failure is None else any(one in failed for one in failure.split("|"))
    if code == 0 and failure is None:
        assert stage.content["found"] == {
            "summary": "910 passed, 1 skipped in 72.10s (0:01:12)",
            "skipped": ["SKIPPED [1] x: no transformers"],
        }


MEMCHECK = "========= ERROR SUMMARY: 0 errors\n40 passed in 9.00s\n"
RACECHECK = "40 passed in 9.00s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("memcheck", "racecheck", "num_failed"),
    [
        ((0, MEMCHECK), (0, RACECHECK), 0),
        ((0, MEMCHECK.replace("0 errors", "10 errors")), (0, RACECHECK), 1),
        ((0, MEMCHECK), (0, RACECHECK.replace("0 warnings", "2 warnings")), 1),
        ((0, ""), (0, "40 passed in 9.00s\n"), 2),
        ((0, MEMCHECK.replace("40 passed", "40 skipped")), (1, RACECHECK), 2),
        ((None, MEMCHECK), (0, RACECHECK), 1),
    ],
)
def test_sanitizer_without_a_clean_report_is_a_failure(
    memcheck: tuple[int | None, str],
    racecheck: tuple[int | None, str],
    num_failed: int,
    record: GpuRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/usr/bin/{name}")
    given: list[float] = []

    def run(command: list[str], timeout_s: float, environment: dict[str, str]) -> tuple[int | None, str]:
        given.append(timeout_s)
        assert ("PYTORCH_NO_CUDA_MEMORY_CACHING" in environment) == ("memcheck" in command)
        return memcheck if "memcheck" in command else racecheck

    monkeypatch.setattr(gpu, "run_command", run)
    stage = record.stage("Sanitizers")
    gpu.sanitize(stage, 100.0)

    assert len(stage.content["failed"]) == num_failed
    assert given == [pytest.approx(50.0, abs=1.0), pytest.approx(100.0, abs=1.0)]


BARE = """
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {missing} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def test_pytest_runs_without_the_plug_ins_that_pyproject_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRAIN_REQUIRE", raising=False)  # A machine that lacks parts does not require them.
    missing = {"pytest_timeout", "xdist", "hypothesis", "transformers", "pyarrow", "duckdb", "fastapi", "trustme"}
    (tmp_path / "sitecustomize.py").write_text(BARE.format(missing=missing))
    environment = gpu.quiet_pytest() | {"PYTHONPATH": str(tmp_path)}
    command = gpu.pytest_command(
        "--slow=without", "tests/unit/ops/test_square_sums.py", "tests/unit/ops/test_rotary.py"
    )
    on_this_machine = ["--kernels=reference" if one == "--kernels=cuda" else one for one in command]
    code, log = gpu.run_command(on_this_machine, 50.0, environment)

    assert code == 0, log
    assert "passed, 1 skipped" in gpu.pytest_summary(log)
    assert "warning" not in log


def test_a_failed_stage_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.gpu_record.machine", dict)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path)])
    for failed, code in (((), 0), (("wrong",), 1)):
        monkeypatch.setattr(
            gpu, "stages", lambda _, is_rehearsal, failed=failed: {"Checks": lambda stage, _: stage.fail(*failed)}
        )
        assert gpu.main() == code


def test_chosen_stages_keep_the_others(
    record: GpuRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu_record.machine", lambda: record.document["machine"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran: list[str] = []

    def run(stage: GpuStage, timeout_s: float, name: str) -> None:
        ran.append(name)
        stage.change(found={"run": len(ran)})

    monkeypatch.setattr(
        gpu,
        "stages",
        lambda _, is_rehearsal: {name: partial(run, name=name) for name in ("Build", "Whole steps", "A, b")},
    )
    for options in ([], ["--stages", "a-b", "whole-steps"], ["--stages", "a-b"]):
        monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path), *options])
        assert gpu.main() == 0
    found = {name: stage["found"] for name, stage in GpuRecord.read(tmp_path).document["stages"].items()}

    assert ran == ["Build", "Whole steps", "A, b", "Whole steps", "A, b", "A, b"]
    assert found == {"Build": {"run": 1}, "Whole steps": {"run": 4}, "A, b": {"run": 6}}
    monkeypatch.setattr(sys, "argv", ["gpu", "--stages", "whole"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no stage is named whole; there are build, whole-steps, a-b" in capsys.readouterr().err


def test_results_of_another_machine_are_not_kept(record: GpuRecord, tmp_path: Path) -> None:
    record.stage("Whole steps").change(found={"seconds": 1.0})
    record.document["machine"] = {"cpu": "another"}
    record.write()

    assert GpuRecord.resume(tmp_path, "python3 -m benchmarks.gpu", ["Build"]).document["stages"] == {}


def test_smoke_checks_are_tests_that_exist() -> None:
    assert len(set(gpu.SMOKE)) == 20
    for test in gpu.SMOKE:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test


@pytest.mark.usefixtures("_forks")
def test_every_stage_runs_in_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rehearse", "--output", str(tmp_path), "--budget-s", "3000"]
    monkeypatch.setattr(sys, "argv", ["gpu", *options])

    assert gpu.main() == 0, capsys.readouterr().out
    stages = GpuRecord.read(tmp_path).document["stages"]
    assert list(stages) == list(gpu.stages(tmp_path, is_rehearsal=True))
    assert {name for name, stage in stages.items() if "no time" in stage["note"]} == set()
    steps = {(row["side"], row["micro-batches"]) for row in stages["Whole steps"]["found"] if row["seconds"] > 0}
    assert steps == {
        (side, number) for side in ("ours, bf16", "ours, FP8 current", "plain torch, compiled") for number in (1, 8)
    }
