"""Build, check and time everything that needs a GPU: `python3 -m benchmarks.gpu`, under nine minutes.

Needs one GPU; python3 with torch for CUDA, numpy, safetensors, pytest and nvidia-ml-py; nvcc, Python's headers and a
C++ compiler. No network, no installation. Stages run one after the other, the most important first, each with at most
the time that is left. What was found is on disk after every figure, so that a run which is cut off leaves what it had:
docs/benchmarks/gpu.json and gpu.md (--output for another place).
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
from benchmarks.gpu_record import Record, Stage
from benchmarks.result import RESULTS

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 525.0
"""With the last process ended and the page printed, under nine minutes."""
CHECKS_S = 200.0
BUILD = "Build"
SANITIZED_TESTS = "test_normalization or test_activation or test_cross_entropy or test_quantization"
CLEAN_SUMMARY = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
Run = Callable[[Stage, float], None]
"""Runs a stage in at most so many seconds."""


def main() -> int:
    """Run the stages. Exit code 2 without a GPU, 1 where something of ours failed."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of gpu.json and gpu.md")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all stages (default %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    Record.begin(args.output, "python3 -m benchmarks.gpu")
    run_all(stages(args.output), args.output, args.budget_s)
    record = Record.read(args.output)
    print((args.output / "gpu.md").read_text())
    return int(any(stage["failed"] for stage in record.document["stages"].values()))


def stages(output: Path) -> dict[str, Run]:
    """Return the stages in order, the most important first. Timing runs in processes of its own."""
    operators, steps = (
        partial(run_in_child, output, f"benchmarks.{name}") for name in ("gpu_operator_stages", "gpu_step_stages")
    )
    return {
        "Ceilings": partial(operators, "Ceilings"),
        BUILD: build,
        "Checks": check,
        "GPU telemetry beside nvidia-smi": check_devices,
        "Memory-bound operations": partial(operators, "Memory-bound operations"),
        "Cross entropy, memory": partial(operators, "Cross entropy, memory"),
        "Weight gradients added in fp32": partial(operators, "Weight gradients added in fp32"),
        "Whole steps": partial(steps, "Whole steps"),
        "Ten steps of 125M beside the CPU": partial(steps, "Ten steps of 125M beside the CPU"),
        "125M by micro-batches of one sample": partial(steps, "125M by micro-batches of one sample"),
        "Activation offload": partial(steps, "Activation offload"),
        "Sanitizers": sanitize,
    }


def run_all(runs: Mapping[str, Run], output: Path, budget_s: float) -> None:
    """Run the stages, each with the time that the others have left. Without kernels none goes on after the build."""
    started, is_built = time.perf_counter(), True
    for name, run in runs.items():
        began = time.perf_counter() - started
        stage = Record.read(output).stage(name)
        if not is_built:
            stage.fail("not started: the kernels were not built")
            continue
        if began >= budget_s:
            stage.change(note="not reached: the time was up")
            continue
        try:
            run(stage, budget_s - began)
        except Exception as error:  # noqa: BLE001 - one stage that breaks must not hide what the others find
            stage.fail(f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - started - began
        # read again: the processes of the stage have written it
        stage = Record.read(output).stage(name)
        stage.change(seconds=round(seconds, 1))
        is_built = name != BUILD or not stage.content["failed"]
        print(f"{name}: {began + seconds:.0f} s", flush=True)


def run_in_child(output: Path, module: str, name: str, stage: Stage, timeout_s: float) -> None:
    """Run a stage in processes of its own: one, and another one behind each figure that a process did not survive."""
    deadline = time.perf_counter() + timeout_s
    command = [sys.executable, "-m", module, name, "--output", str(output)]
    before = ""
    while True:
        code, log = run_command(command, deadline - time.perf_counter())
        stage = Record.read(output).stage(name)
        if stage.content["is_done"]:
            return
        if code is None:
            stage.change(note="cut off: the time was up")
            return
        if json.dumps(stage.content) == before:
            stage.fail(f"exit code {code}: {log[-1500:]}")
            return
        before = json.dumps(stage.content)


def build(stage: Stage, timeout_s: float) -> None:
    """Compile the kernels for the GPU at hand, in the place where the next processes load them from."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}.{minor}{'a' if major >= 9 else ''}"
    stage.change(found={"architecture": architecture})
    options = ["--output", "megatrain/_C.abi3.so", "--arch", architecture, "--jobs", str(os.cpu_count() or 1)]
    code, log = run_command([sys.executable, "csrc/build.py", *options], timeout_s)
    if code != 0:
        stage.fail(log[-3000:] if code is not None else f"not built after {timeout_s:.0f} s")


def check(stage: Stage, timeout_s: float) -> None:
    """Run the tests of the operators, and those that need a GPU, on the kernels."""
    code, log = run_command(pytest_command("tests/unit/ops", "tests/gpu"), min(timeout_s, CHECKS_S), quiet_pytest())
    summary = pytest_summary(log)
    stage.change(found={"summary": summary, "skipped": re.findall(r"^SKIPPED .*$", log, re.MULTILINE)[:20]})
    stage.fail(*re.findall(r"^(?:FAILED|ERROR) .*$", log, re.MULTILINE)[:20])
    if code is None:
        stage.fail(f"stopped in the middle of the tests: {log[-1500:]}")
    elif (code != 0 or "passed" not in summary) and not stage.content["failed"]:
        stage.fail(f"exit code {code}: {log[-1500:]}")


def sanitize(stage: Stage, timeout_s: float) -> None:
    """Run tests of the kernels under compute-sanitizer. A tool that does not say that all is well has failed."""
    if shutil.which("compute-sanitizer") is None:
        stage.change(note="not measured: compute-sanitizer is not on this machine")
        return
    deadline = time.perf_counter() + timeout_s
    found: dict[str, str] = {}
    tests = pytest_command("tests/unit/ops", "-x", "-k", SANITIZED_TESTS)
    for number, (tool, clean) in enumerate(CLEAN_SUMMARY.items()):
        options, environment = ["--tool", tool], quiet_pytest()
        if tool == "memcheck":
            # torch asks the driver what it supports; errors are the answer
            options += ["--report-api-errors", "no"]
            # every tensor by itself: inside one block of torch's, an access past its end hits a neighbour unseen
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


def pytest_command(*arguments: str) -> list[str]:
    """Return what runs tests on the kernels, without pyproject.toml: its settings want plug-ins of pytest."""
    own = ["-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    return [sys.executable, "-m", "pytest", "-q", "-rfEs", *own, "--kernels=cuda", *arguments]


def quiet_pytest() -> dict[str, str]:
    """Return the environment in which pytest loads no plug-ins of this machine."""
    return {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def pytest_summary(log: str) -> str:
    """Return the line in which pytest counts, or ""."""
    lines = re.findall(
        r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error|warning|deselected).* in [\d.]+s.*?)(?: =+)?$", log, re.M
    )
    return lines[-1] if lines else ""


def run_command(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command in the repository and return its exit code, None where the time was up, and what it printed.

    environment: variables beside this process's own.
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
                # with the processes that it started: they hold the GPU too
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return code, log.read()


if __name__ == "__main__":
    sys.exit(main())
