"""How a run of the GPU benchmark holds together without a GPU: its record, its processes, and what breaks in them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import csrc.build
from benchmarks import gpu, gpu_operator_stages, gpu_stage, gpu_step, gpu_step_stages
from benchmarks.gpu_operator_cases import Case, compiled
from benchmarks.gpu_operator_stages import operation
from benchmarks.gpu_record import Record, Stage, beside, markdown
from benchmarks.gpu_stage import BrokenDeviceError, described, fill, run_stage
from benchmarks.gpu_step import measure, model_config, our_config
from tests.helpers.source_tree import ROOT

TINY = {"hidden_size": 64, "ffn_size": 96, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.begin(tmp_path, "python3 -m benchmarks.gpu")


@pytest.fixture
def _usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stage, "is_device_usable", lambda: True)
    monkeypatch.setattr(gpu_stage, "release", lambda: None)


def raises(error: Exception) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def test_every_figure_is_on_disk_when_it_is_found(record: Record, tmp_path: Path) -> None:
    record.stage("Ceilings").change(found={"copy, TB/s": 4.2})
    operations = record.stage("Memory-bound operations")
    row = operations.row(operation="rms_norm")
    row["ours, us"] = 50.0
    operations.row(operation="swiglu")["eager, us"] = "ValueError: no"
    operations.fail("swiglu is wrong")
    record.stage("Whole steps").change(note="not reached: the time was up")

    again = Record.read(tmp_path)
    assert again.document == json.loads((tmp_path / "gpu.json").read_text()) == record.document
    assert again.stage("Memory-bound operations").row(operation="rms_norm") == row
    page = (tmp_path / "gpu.md").read_text()
    assert page == markdown(record.document)
    assert "- copy, TB/s: 4.2" in page
    assert "| operation | ours, us | eager, us |" in page
    assert "| swiglu |  | ValueError: no |" in page
    assert "    swiglu is wrong" in page
    assert "not reached: the time was up" in page


def test_sides_are_compared_with_one_of_them_and_a_side_that_broke_stays_in_the_table() -> None:
    rows: list[dict[str, Any]] = [
        {"side": "a", "layers": 9, "seconds": "out of memory"},
        {"side": "a", "layers": 8, "seconds": 2.0},
        {"side": "b", "layers": 8, "seconds": 3.0},
        {"side": "b", "layers": 9, "seconds": 3.0},
        {"side": "c", "layers": 8},
    ]
    beside(rows, "seconds", "a")

    assert [row["seconds / a"] for row in rows] == ["", 1.0, 1.5, "", ""]


@pytest.mark.usefixtures("_usable")
def test_a_figure_that_fails_is_said_in_its_place(record: Record, tmp_path: Path) -> None:
    stage = record.stage("Some")
    row = stage.row(operation="x")
    fill(stage, row, "eager, us", raises(ValueError("no such | thing\nat all")), is_ours=False)
    fill(stage, row, "empty, us", raises(AssertionError()), is_ours=False)
    assert not stage.content["failed"]
    fill(stage, row, "ours, us", raises(ValueError("wrong")), is_ours=True)
    fill(stage, row, "seconds", lambda: {"seconds": 2.0, "mfu": 0.5}, is_ours=True)
    fill(stage, row, "large, us", raises(torch.OutOfMemoryError("CUDA out of memory. Tried")), is_ours=True)

    assert Record.read(tmp_path).stage("Some").content["found"] == [
        {
            "operation": "x",
            "eager, us": "ValueError: no such / thing",
            "empty, us": "AssertionError: ",
            "ours, us": "ValueError: wrong",
            "seconds": 2.0,
            "mfu": 0.5,
            "large, us": "out of memory: CUDA out of memory. Tried",
        }
    ]
    assert Record.read(tmp_path).stage("Some").content["failed"] == ["x, ours, us: ValueError: wrong"]


def test_too_little_memory_is_seen_inside_another_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("backend failed") from torch.OutOfMemoryError("CUDA out of memory")
    assert described(caught.value) == "out of memory: backend failed"
    assert described(RuntimeError("backend failed")) == "RuntimeError: backend failed"


def test_an_error_that_the_gpu_does_not_survive_ends_the_process_once(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_stage, "is_device_usable", lambda: False)
    monkeypatch.setattr(gpu_stage, "release", lambda: None)
    stage = record.stage("Some")
    row = stage.row(operation="x")
    with pytest.raises(BrokenDeviceError, match="illegal"):
        fill(stage, row, "ours, us", raises(RuntimeError("illegal access")), is_ours=True)
    fill(stage, row, "ours, us", raises(RuntimeError("never called")), is_ours=True)

    assert row == {"operation": "x", "ours, us": "RuntimeError: illegal access"}


@pytest.mark.usefixtures("_usable")
def test_one_side_of_an_operation_that_fails_leaves_the_others(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds_of(work: Callable[[], float]) -> float:
        return work()

    def theirs(wrap: Callable[[Any], Any]) -> Callable[[], float]:
        if wrap is compiled:
            raise ValueError("cannot be compiled")
        return lambda: 4e-6

    monkeypatch.setattr("benchmarks.gpu_operator_stages.seconds_of", seconds_of)
    stage = record.stage("Some")
    operation(stage, Case("x", 2000, lambda: lambda: 2e-6, theirs), bandwidth=2e9)
    operation(
        stage, Case("y", 2000, raises(ValueError("wrong")), theirs, why_not_compiled="one kernel"), bandwidth=None
    )

    x, y = stage.content["found"]
    assert x == {
        "operation": "x",
        "ours, us": pytest.approx(2.0),
        "of copy bandwidth": pytest.approx(0.5),
        "eager, us": pytest.approx(4.0),
        "compiled, us": "ValueError: cannot be compiled",
        "eager / ours": pytest.approx(2.0),
        "compiled / ours": "",
    }
    assert (y["ours, us"], y["eager, us"], y["compiled, us"]) == (
        "ValueError: wrong",
        pytest.approx(4.0),
        "one kernel",
    )
    assert stage.content["failed"] == ["y, ours, us: ValueError: wrong"]


def test_no_stage_measures_without_kernels(record: Record, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    called: list[str] = []
    stages = {name: lambda stage, name=name: called.append(name) for name in ("Ceilings", "Whole steps")}
    for name in stages:
        run_stage(stages, [name, "--output", str(tmp_path)], without_kernels=["Ceilings"])

    assert called == ["Ceilings"]
    found = Record.read(tmp_path)
    assert [found.stage(name).content["is_done"] for name in stages] == [True, True]
    (reason,) = found.stage("Whole steps").content["failed"]
    assert reason.startswith("not measured, there are no compiled kernels: ")


KERNELS_STAND_IN = '''
import sys
from importlib.machinery import PathFinder
import torch


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
gpu_stage.set_allocator = lambda settings: None
stages = dict.fromkeys(["Before", "Timing"], lambda stage: stage.change(found={{"ours": 1.0}}))
sys.exit(gpu_stage.run_stage(stages))
'''


@pytest.mark.parametrize("architecture", ["9.0a", "8.0", None])
def test_what_is_timed_are_the_kernels_that_were_just_built(
    architecture: str | None, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timing_stand_in.py").write_text(KERNELS_STAND_IN.format(directory=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def build(stage: Stage, timeout_s: float) -> None:
        if architecture is None:
            raise RuntimeError("no nvcc")
        (tmp_path / "_C.py").write_text(f'architectures = "{architecture}"\n')

    before, timing = (partial(gpu.run_in_child, tmp_path, "timing_stand_in", name) for name in ("Before", "Timing"))
    gpu.run_all({"Before": before, gpu.BUILD: build, "Timing": timing}, tmp_path, budget_s=50.0)

    assert "was not built" in "".join(Record.read(tmp_path).stage("Before").content["failed"])
    found = Record.read(tmp_path).stage("Timing").content
    assert found["found"] == ({"ours": 1.0} if architecture == "9.0a" else [])
    refusal = "" if architecture == "9.0a" else "not started" if architecture is None else "compute capability 8.0"
    assert refusal in "".join(found["failed"])
    assert bool(found["failed"]) == bool(refusal)


def test_the_process_that_builds_has_asked_for_no_kernels() -> None:
    code = "import sys, benchmarks.gpu; print([one for one in sys.modules if one.startswith('megatrain')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_stage_that_is_asked_for_is_there(tmp_path: Path) -> None:
    asked = {run.args[1:] for run in gpu.stages(tmp_path).values() if isinstance(run, partial)}
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
from benchmarks.gpu_record import Record
from benchmarks.gpu_stage import fill
import benchmarks.gpu_stage as gpu_stage
gpu_stage.release = lambda: None
gpu_stage.is_device_usable = lambda: True
stage = Record.read(Path(sys.argv[3])).stage(sys.argv[1])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
for name, work in (("a", lambda: 1.0), ("b", die), ("c", lambda: 3.0)):
    fill(stage, stage.row(side=name), "seconds", work, is_ours=True)
if sys.argv[1] == "Broken":
    raise RuntimeError("in between")
stage.change(is_done=True)
"""


@pytest.mark.parametrize(
    ("name", "failures"), [("Whole", ["did not come back"]), ("Broken", ["come back", "in between"])]
)
def test_a_stage_goes_on_behind_what_a_process_did_not_survive(
    name: str, failures: list[str], record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_stage.py").write_text(CRASHING_STAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    gpu.run_in_child(tmp_path, "crashing_stage", name, record.stage(name), 50.0)

    content = Record.read(tmp_path).stage(name).content
    lost = "the process did not come back from it"
    assert [row["seconds"] for row in content["found"]] == [1.0, lost, 3.0]
    assert len(content["failed"]) == len(failures)
    assert all(part in reason for part, reason in zip(failures, content["failed"], strict=True))


def test_stages_get_the_time_that_is_left_and_the_last_are_not_reached(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    given: list[float] = []

    def run(stage: Stage, timeout_s: float) -> None:
        given.append(timeout_s)
        clock[0] += 40.0
        raise ValueError("broken")

    gpu.run_all(dict.fromkeys("abcd", run), tmp_path, budget_s=100.0)

    assert given == [100.0, 60.0, 20.0]
    stages = Record.read(tmp_path).document["stages"]
    assert [stages[name]["failed"] for name in "abcd"] == [["ValueError: broken"]] * 3 + [[]]
    assert stages["d"]["note"] == "not reached: the time was up"
    assert stages["a"]["seconds"] == 40.0


def test_a_command_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    found, log = gpu.run_command(["sh", "-c", f"echo begun; exec 3>{held}; sleep 60 & wait"], 1.0)

    assert (found, log) == (None, "begun\n")
    # readable when nobody holds the other end any more
    assert select.select([reader], [], [], 10.0)[0] == [reader]
    os.close(reader)


@pytest.mark.parametrize(("capability", "architecture"), [((9, 0), "9.0a"), ((8, 9), "8.9")])
@pytest.mark.parametrize(("code", "failures"), [(0, []), (1, ["nvcc failed"]), (None, ["not built after 50 s"])])
def test_kernels_are_built_for_the_gpu_at_hand(
    capability: tuple[int, int],
    architecture: str,
    code: int | None,
    failures: list[str],
    record: Record,
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
    code: int | None, log: str, failure: str | None, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "run_command", run_stand_in(code, log))
    stage = record.stage("Checks")
    gpu.check(stage, 100.0)

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
def test_a_sanitizer_that_does_not_say_that_all_is_well_is_a_failure(
    memcheck: tuple[int | None, str],
    racecheck: tuple[int | None, str],
    num_failed: int,
    record: Record,
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
    monkeypatch.delenv("MEGATRAIN_REQUIRE", raising=False)  # a machine that lacks things does not require them
    missing = {"pytest_timeout", "xdist", "hypothesis", "transformers", "pyarrow", "duckdb", "fastapi", "trustme"}
    (tmp_path / "sitecustomize.py").write_text(BARE.format(missing=missing))
    environment = gpu.quiet_pytest() | {"PYTHONPATH": str(tmp_path)}
    command = gpu.pytest_command("tests/unit/ops/test_square_sums.py", "tests/unit/ops/test_rotary.py")
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
        monkeypatch.setattr(gpu, "stages", lambda _, failed=failed: {"Checks": lambda stage, _: stage.fail(*failed)})
        assert gpu.main() == code


@pytest.fixture
def _cuda_stand_in(monkeypatch: pytest.MonkeyPatch, _usable: None) -> None:
    for name, value in {
        "reset_peak_memory_stats": None, "synchronize": None, "memory_reserved": 3 << 30,
        "max_memory_allocated": 2 << 30, "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": SimpleNamespace(total_memory=85_000_000_000),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_step_stages, "profiled_idle", lambda *_: 0.25)


@pytest.mark.usefixtures("_cuda_stand_in")
def test_a_measured_side_has_its_figures() -> None:
    config = our_config(model_config(1, seq_len=32, **TINY))
    figures = measure(lambda tokens: float(tokens.sum()), config, torch.ones(33, 1), peak_flops=1e12)

    assert figures.losses == (33.0,) * gpu_step.STEPS
    assert (figures.peak_gib, figures.held_gib, figures.growth_gib) == (2.0, 3.0, 0.0)
    assert figures.tokens_per_s == pytest.approx(32 / figures.seconds)


class StandInTrainer:
    """Steps that take no time, of sides that do or do not fit."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1

    def step(self, tokens_SB: Tensor) -> float:
        return 1.0


@pytest.mark.usefixtures("_cuda_stand_in")
def test_both_sides_are_measured_again_with_fewer_layers_where_one_does_not_fit(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = StandInTrainer()

    def our_side(config: Any, device: torch.device) -> tuple[Callable[[Tensor], float], StandInTrainer]:
        if config.fp8.recipe == "rowwise":
            raise ValueError("no such product")
        return trainer.step, trainer

    def peer(model: dict[str, Any], device: torch.device, *, is_compiled: bool) -> Callable[[Tensor], float]:
        if model["num_layers"] > 7:
            raise RuntimeError("backend failed") from torch.OutOfMemoryError("CUDA out of memory")
        return trainer.step

    monkeypatch.setattr(gpu_step_stages, "our_step", our_side)
    monkeypatch.setattr(gpu_step_stages, "peer_step", peer)
    stage = record.stage("Whole steps")
    gpu_step_stages.whole_steps(stage)

    rows = stage.content["found"]
    assert [(row["side"], row["layers"]) for row in rows] == [
        ("ours, bf16", 10), ("plain torch, compiled", 10), ("ours, bf16", 8), ("plain torch, compiled", 8),
        ("ours, bf16", 7), ("plain torch, compiled", 7),
        ("ours, FP8 delayed", 7), ("ours, FP8 current", 7), ("ours, FP8 by row", 7),
    ]  # fmt: skip
    compared = [isinstance(row["seconds / ours, bf16"], float) for row in rows]
    assert compared == [True, False, True, False, True, True, True, True, False]
    assert rows[1]["seconds"] == "out of memory: backend failed"
    assert rows[0]["idle"] == 0.25
    assert stage.content["failed"] == ["ours, FP8 by row, seconds: ValueError: no such product"]
    assert trainer.num_closed == 5


@pytest.mark.usefixtures("_usable")
@pytest.mark.parametrize(
    ("on_gpu", "is_failed"), [(5.05, False), (5.2, True), (float("nan"), True), (0.0, True)], ids=str
)
def test_losses_that_differ_are_a_failure(
    on_gpu: float, is_failed: bool, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = gpu_step_stages.PARITY_STEPS

    def our_side(config: Any, device: torch.device) -> tuple[Callable[[Tensor], float], StandInTrainer]:
        losses = iter([5.0] * (num_steps - 1) + [on_gpu if device.type == "cuda" else 5.0])
        return lambda _: next(losses), StandInTrainer()

    monkeypatch.setattr(gpu_step_stages, "our_step", our_side)
    stage = record.stage("Parity")
    gpu_step_stages.parity(stage)

    assert bool(stage.content["failed"]) == is_failed
    assert Record.read(tmp_path).stage("Parity").content["found"]["cpu"] == [5.0] * num_steps


@pytest.mark.usefixtures("_usable")
def test_a_way_to_add_that_torch_does_not_have_leaves_the_others(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"ours": lambda: lambda: 2.0, "rounded": raises(TypeError("out_dtype")), "alone": lambda: lambda: 1.0}
    monkeypatch.setattr(gpu_operator_stages, "seconds_of", lambda work: work())
    monkeypatch.setattr(gpu_operator_stages, "products", lambda *_: [("qkv", 4 * 10**12, ways)])
    stage = record.stage("Weights")
    gpu_operator_stages.weight_gradients(stage)

    assert stage.content["found"] == [
        {"gradient of": "qkv", "ours, TFLOP/s": 2.0, "rounded, TFLOP/s": "TypeError: out_dtype", "alone, TFLOP/s": 4.0}
    ]
    assert not stage.content["failed"]


@pytest.mark.usefixtures("_cuda_stand_in")
def test_a_host_bound_side_that_fails_leaves_the_other(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StandInTrainer()

    def our_side(config: Any, device: torch.device) -> tuple[Callable[[Tensor], float], StandInTrainer]:
        if not config.kernels.cuda_graphs:
            raise ValueError("broken")
        return trainer.step, trainer

    monkeypatch.setattr(gpu_step_stages, "our_step", our_side)
    stage = record.stage("125M")
    gpu_step_stages.host_bound_steps(stage)

    broken, whole = stage.content["found"]
    assert (broken["seconds"], broken["idle"]) == ("ValueError: broken",) * 2
    assert isinstance(whole["seconds"], float)
    assert whole["idle"] == 0.25
    assert whole["seconds / launched by Python"] == ""
