"""Build, check and time everything that needs a GPU: `python3 -m benchmarks.gpu`. It takes less than nine minutes.

It needs one GPU; python3 with torch for CUDA, numpy, safetensors, pytest and nvidia-ml-py; nvcc, Python's headers and a
C++ compiler. It needs no network and installs nothing. Stages run one after the other, the most important first, each
within the time that is left. Every figure is written at once to gpu.json and gpu.md in docs/benchmarks, or in the
directory of --output, so that a run that is interrupted keeps its figures. --stages runs some stages again, or those
that were not reached, and keeps the others. --rehearse runs all stages but the build on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_devices import check_devices
from benchmarks.gpu_record import GpuRecord, GpuStage
from benchmarks.result import RESULTS

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 525.0
"""Leaves time to end the last process and to print the page within nine minutes."""
CHECKS_S = 200.0
BUILD = "Build"
SMOKE = (
    "tests/unit/ops/test_square_sums.py::test_every_element_counts_once",
    "tests/unit/ops/test_normalization.py::test_norms_are_torchs",
    "tests/unit/ops/test_normalization.py::test_norm_gradients_are_the_slopes",
    "tests/unit/ops/test_activation.py::test_activations_are_their_formulas",
    "tests/unit/ops/test_activation.py::test_activation_gradients_are_the_slopes",
    "tests/unit/ops/test_rotary.py::test_rotation_is_llamas",
    "tests/unit/ops/test_rotary.py::test_rotary_gradient_is_the_slope",
    "tests/unit/ops/test_dropout.py::test_elements_are_dropped_or_scaled",
    "tests/unit/ops/test_embedding_op.py::test_embedding_takes_rows",
    "tests/unit/ops/test_embedding_op.py::test_gradient_is_the_slope",
    "tests/unit/ops/test_cross_entropy_op.py::test_parts_combine_to_the_whole",
    "tests/unit/ops/test_cross_entropy_op.py::test_gradients_are_the_slopes",
    "tests/unit/ops/test_linear.py::test_gradients_of_micro_batches_add_up_in_the_sink",
    "tests/unit/ops/test_quantization.py::test_quantized_values_are_the_scaled_ones",
    "tests/unit/ops/test_fp8_linear.py::test_fp8_products_are_off_by_what_their_bits_allow",
    "tests/unit/ops/test_optimizer_step.py::test_adamw_is_its_formula",
    "tests/unit/ops/test_optimizer_step.py::test_lamb_is_its_formula",
    "tests/gpu/test_gpu_smoke.py::test_random_numbers_are_those_of_the_cpu",
    "tests/gpu/test_gpu_smoke.py::test_losses_are_those_of_the_cpu",
    "tests/gpu/test_gpu_host_waits.py::test_a_step_waits_once_for_the_gpu",
)
"""One test of each kernel, and of the whole: what must work before a time means anything."""
REHEARSED = ("tests/unit/ops/test_square_sums.py", "tests/unit/ops/test_packed_documents.py")
"""Tests that take the place of all checks in a rehearsal."""
SANITIZED_TESTS = "test_normalization or test_activation or test_cross_entropy or test_quantization"
CLEAN_SUMMARY = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
Run = Callable[[GpuStage, float], None]
"""Runs a stage in at most the given number of seconds."""


def main() -> int:
    """Run the stages. Exit code: 2 without a GPU, 1 where a stage failed."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of gpu.json and gpu.md")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all stages (default %(default)s)")
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="these only, in their order; keep the others")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny sizes; the figures mean nothing")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    runs = {option(name): (name, run) for name, run in stages(args.output, is_rehearsal=args.rehearse).items()}
    unknown = [name for name in args.stages or () if name not in runs]
    if unknown:
        parser.error(f"--stages: no stage is named {', '.join(unknown)}; there are {', '.join(runs)}")
    chosen = dict(found for name, found in runs.items() if args.stages is None or name in args.stages)
    command = "python3 -m benchmarks.gpu" + (" --rehearse" if args.rehearse else "")
    if args.stages is None:
        GpuRecord.begin(args.output, command)
    else:
        GpuRecord.resume(args.output, command, chosen)
    run_all(chosen, args.output, args.budget_s)
    record = GpuRecord.read(args.output)
    print((args.output / "gpu.md").read_text())
    return int(any(stage["failed"] for stage in record.document["stages"].values()))


def option(name: str) -> str:
    """Return a stage's name for the command line."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def stages(output: Path, *, is_rehearsal: bool = False) -> dict[str, Run]:
    """Return the stages in order, the most important first. Timing stages run in their own processes."""

    def child(module: str, name: str) -> Run:
        return partial(run_in_child, output, f"benchmarks.{module}", name, is_rehearsal=is_rehearsal)

    return {
        "Ceilings": child("gpu_operator_stages", "Ceilings"),
        BUILD: not_rehearsed if is_rehearsal else build,
        "Smoke checks": partial(check, REHEARSED[:1] if is_rehearsal else SMOKE, is_rehearsal=is_rehearsal),
        "Whole steps": child("gpu_step_stages", "Whole steps"),
        "Memory-bound operations": child("gpu_operator_stages", "Memory-bound operations"),
        "Weight gradients added in fp32": child("gpu_operator_stages", "Weight gradients added in fp32"),
        "Cross entropy, memory": child("gpu_operator_stages", "Cross entropy, memory"),
        "Ten steps of 125M beside the CPU": child("gpu_step_stages", "Ten steps of 125M beside the CPU"),
        "125M by micro-batches of one sample": child("gpu_step_stages", "125M by micro-batches of one sample"),
        "Whole steps, other scales in FP8": child("gpu_step_stages", "Whole steps, other scales in FP8"),
        "Activation offload": child("gpu_step_stages", "Activation offload"),
        "Checks": partial(
            check, REHEARSED if is_rehearsal else ("tests/unit/ops", "tests/gpu"), is_rehearsal=is_rehearsal
        ),
        "GPU telemetry beside nvidia-smi": check_devices,
        "Sanitizers": sanitize,
    }


def not_rehearsed(stage: GpuStage, timeout_s: float) -> None:
    """Note that this stage is part of a measurement only."""
    stage.change(note="not part of a rehearsal")


def run_all(runs: Mapping[str, Run], output: Path, budget_s: float) -> None:
    """Run the stages, each with the time that earlier ones have left. If the build fails, no further stage starts."""
    started, is_built = time.perf_counter(), True
    for name, run in runs.items():
        began = time.perf_counter() - started
        stage = GpuRecord.read(output).stage(name)
        if not is_built:
            stage.fail("not started: the kernels were not built")
            continue
        if began >= budget_s:
            stage.change(note="not started: no time was left")
            continue
        try:
            run(stage, budget_s - began)
        except Exception as error:  # noqa: BLE001 - one stage that breaks must not hide what the others find
            stage.fail(f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - started - began
        # the record is read again, because the processes of the stage have written it
        stage = GpuRecord.read(output).stage(name)
        stage.change(seconds=round(seconds, 1))
        is_built = name != BUILD or not stage.content["failed"]
        print(f"{name}: {began + seconds:.0f} s", flush=True)


def run_in_child(
    output: Path, module: str, name: str, stage: GpuStage, timeout_s: float, *, is_rehearsal: bool = False
) -> None:
    """Run a stage in a process of its own. After each figure that the process did not survive, start another one."""
    deadline = time.perf_counter() + timeout_s
    command = [sys.executable, "-m", module, name, "--output", str(output)]
    command += ["--rehearse"] if is_rehearsal else []
    environment = {"OMP_NUM_THREADS": "1"} if is_rehearsal else {}  # tiny work in threads would only wait
    before = ""
    while True:
        code, log = run_command(command, deadline - time.perf_counter(), environment)
        stage = GpuRecord.read(output).stage(name)
        if stage.content["is_done"]:
            return
        if code is None:
            stage.change(note="stopped: no time was left")
            return
        if json.dumps(stage.content) == before:
            stage.fail(f"exit code {code}: {log[-1500:]}")
            return
        before = json.dumps(stage.content)


def build(stage: GpuStage, timeout_s: float) -> None:
    """Compile the kernels for this machine's GPU, at the place from which later processes load them."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}.{minor}{'a' if major >= 9 else ''}"
    stage.change(found={"architecture": architecture})
    options = ["--output", "megatrain/_C.abi3.so", "--arch", architecture, "--jobs", str(os.cpu_count() or 1)]
    code, log = run_command([sys.executable, "csrc/build.py", *options], timeout_s)
    if code != 0:
        stage.fail(log[-3000:] if code is not None else f"not built after {timeout_s:.0f} s")


def check(tests: Sequence[str], stage: GpuStage, timeout_s: float, *, is_rehearsal: bool = False) -> None:
    """Run these tests on the kernels, in a rehearsal in plain torch."""
    kernels = "reference" if is_rehearsal else "cuda"
    code, log = run_command(pytest_command(*tests, kernels=kernels), min(timeout_s, CHECKS_S), quiet_pytest())
    summary = pytest_summary(log)
    stage.change(found={"summary": summary, "skipped": re.findall(r"^SKIPPED .*$", log, re.MULTILINE)[:20]})
    stage.fail(*re.findall(r"^(?:FAILED|ERROR) .*$", log, re.MULTILINE)[:20])
    if code is None:
        stage.fail(f"stopped in the middle of the tests: {log[-1500:]}")
    elif (code != 0 or "passed" not in summary) and not stage.content["failed"]:
        stage.fail(f"exit code {code}: {log[-1500:]}")


def sanitize(stage: GpuStage, timeout_s: float) -> None:
    """Run tests of the kernels under compute-sanitizer. A tool fails unless its summary reports no errors."""
    if shutil.which("compute-sanitizer") is None:
        stage.change(note="not measured: compute-sanitizer is not on this machine")
        return
    deadline = time.perf_counter() + timeout_s
    found: dict[str, str] = {}
    tests = pytest_command("tests/unit/ops", "-x", "-k", SANITIZED_TESTS)
    for number, (tool, clean) in enumerate(CLEAN_SUMMARY.items()):
        options, environment = ["--tool", tool], quiet_pytest()
        if tool == "memcheck":
            # torch queries the driver for supported features, and an error is the answer for an unsupported one
            options += ["--report-api-errors", "no"]
            # one allocation for each tensor: inside a block of torch's allocator, an access past the end of a tensor
            # would hit a neighbor without being detected
            environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        left_s = (deadline - time.perf_counter()) / (len(CLEAN_SUMMARY) - number)
        code, log = run_command(["compute-sanitizer", *options, *tests], left_s, environment)
        lines = [line.removeprefix("=========").strip() for line in log.splitlines() if "SUMMARY:" in line]
        found[tool] = f"{lines[-1] if lines else 'no summary'}; {pytest_summary(log) or 'no tests'}"
        stage.change(found=found)
        if code is None:
            stage.fail(f"{tool}: stopped after {left_s:.0f} s")
        elif code != 0 or lines[-1:] != [clean] or "passed" not in found[tool]:
            stage.fail(f"{tool}: exit code {code}: {found[tool]}\n{log[-1500:]}")


def pytest_command(*arguments: str, kernels: str = "cuda") -> list[str]:
    """Return the command that runs tests. It ignores pyproject.toml, which needs plug-ins of pytest.

    kernels: see tests/conftest.py.
    """
    own = ["-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    return [sys.executable, "-m", "pytest", "-q", "-rfEs", *own, f"--kernels={kernels}", *arguments]


def quiet_pytest() -> dict[str, str]:
    """Return the environment in which pytest loads no plug-ins of this machine."""
    return {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def pytest_summary(log: str) -> str:
    """Return the summary line of pytest, or ""."""
    lines = re.findall(
        r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error|warning|deselected).* in [\d.]+s.*?)(?: =+)?$", log, re.M
    )
    return lines[-1] if lines else ""


def run_command(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command in the repository. Return its exit code, or None if the time was up, and its output.

    environment: variables in addition to those of this process.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )  # fmt: skip
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):  # the missing code shows it to the caller
                code = process.wait(max(timeout_s, 0.0))
        finally:
            if process.returncode is None:
                # the processes that it started are killed too, because they hold the GPU
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return code, log.read()


if __name__ == "__main__":
    sys.exit(main())
