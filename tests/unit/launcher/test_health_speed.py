"""Timed checks compared with a host's own history, the file of that history, and the probe that measures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.records.host_records import CheckOutcome
from megatrain_launcher.health import timed
from megatrain_launcher.health.child import ProbeEnd, run_probe
from megatrain_launcher.health.context import HealthFinding
from megatrain_launcher.health.forked import measurements
from megatrain_launcher.health.history import MAX_NAMES, MAX_SAMPLES, HealthHistory, read_history, write_history
from tests.helpers.health_contexts import health_context
from tests.helpers.processes import is_running
from tests.helpers.waiting import DEADLINE_S, wait_until

CPU = "cpu x4"


def lines(
    matmul_s: float = 0.02, *, busy: float = 0.0, device_type: str = "cpu", reduce_s: float = 0.003
) -> list[dict]:
    device = "cpu" if device_type == "cpu" else "cuda:0"
    return [
        {"part": "device", "device_type": device_type, "num_devices": 1, "hardware": CPU},
        {
            "part": "compute",
            "number": 0,
            "device": device,
            "name": "",
            "matmul_s": matmul_s,
            "copy_s": 0.03,
            "is_repeatable": True,
        },
        {"part": "compute-load", "others_busy": busy},
        {"part": "loopback", "number": 0, "wait_s": 0.1, "reduce_s": reduce_s},
        {"part": "loopback", "number": 1, "wait_s": 0.1, "reduce_s": reduce_s / 2},
        {"part": "loopback-load", "others_busy": busy},
    ]


def usual() -> HealthHistory:
    history = HealthHistory()
    for _ in range(3):
        history = history.with_findings(timed.judge_speed(timed.timings_of(lines(), ""), history, 1.5)[0])
    return history


def outcomes(some: list[dict], history: HealthHistory, problem: str = "") -> tuple[list[str], bool, str]:
    findings, is_slow = timed.judge_speed(timed.timings_of(some, problem), history, 1.5)
    assert tuple(finding.name for finding in findings) == timed.NAMES
    return [finding.outcome for finding in findings], is_slow, "; ".join(finding.detail for finding in findings)


def test_first_measurements_pass_and_are_remembered() -> None:
    history = HealthHistory()
    for matmul_s in (0.02, 0.08, 0.05):
        found, is_slow, detail = outcomes(lines(matmul_s), history)
        assert found == ["passed"] * 3
        assert not is_slow
        assert "no history yet" in detail
        history = history.with_findings(timed.judge_speed(timed.timings_of(lines(matmul_s), ""), history, 1.5)[0])
    assert history.usual(f"matmul/{CPU}/cpu") == 0.05
    assert history.usual(f"loopback/{CPU}/all-reduce") == 0.003  # the slower one of its ranks


def test_device_slower_than_its_history_fails() -> None:
    history = usual()
    assert outcomes(lines(0.029), history)[:2] == (["passed"] * 3, False)
    found, is_slow, detail = outcomes(lines(0.031), history)
    assert (found, is_slow) == (["failed", "passed", "passed"], True)
    assert "cpu 31.00 ms, usually 20.00; recovery.max_slowdown=1.5" in detail
    assert outcomes(lines(reduce_s=0.006), history)[0] == ["passed", "passed", "failed"]
    assert outcomes(lines(reduce_s=0.0048), history)[0] == ["passed"] * 3  # 1.6 times, but 1.8 ms are noise


def test_cpu_load_excuses_slowness_of_a_cpu_only() -> None:
    history = usual()
    found, is_slow, detail = outcomes(lines(0.1, busy=0.5), history)
    assert (found, is_slow) == (["warning", "passed", "passed"], False)
    assert "other programs use 50%" in detail
    for _ in range(3):
        history = history.with_findings(
            timed.judge_speed(timed.timings_of(lines(device_type="cuda"), ""), history, 1.5)[0],
        )
    assert outcomes(lines(0.1, busy=0.5, device_type="cuda"), history)[0] == ["failed", "passed", "passed"]


def test_slow_measurements_do_not_become_usual() -> None:
    history = usual()
    slow = timed.judge_speed(timed.timings_of(lines(0.1), ""), history, 1.5)[0]
    assert history.with_findings(slow).usual(f"matmul/{CPU}/cpu") == 0.02


def test_other_hardware_has_a_history_of_its_own() -> None:
    some = lines(0.1)
    some[0]["hardware"] = "cpu x1"
    assert outcomes(some, usual())[0] == ["passed"] * 3


def test_device_that_computes_wrong_fails() -> None:
    some = lines()
    some[1]["is_repeatable"] = False
    found, is_slow, detail = outcomes(some, HealthHistory())
    assert (found, is_slow) == (["failed", "passed", "passed"], False)
    assert "computes wrong" in detail


def test_a_gpu_that_torch_does_not_see_any_more() -> None:
    findings = timed.judge_speed(timed.timings_of(lines(device_type="cuda"), ""), HealthHistory(), 1.5)[0]
    history = HealthHistory().with_findings(findings)
    found, _, detail = outcomes(lines(), history)
    assert found == ["failed", "skipped", "skipped"]
    assert "saw 1" in detail


def test_kinds_of_broken_measurements_are_distinguished() -> None:
    for some, problem, expected, detail in [
        ([], "SIGSEGV", ["failed"] * 3, "SIGSEGV"),
        ([{"part": "device", "error": "torch sees no CUDA device"}], "", ["failed"] * 3, "no CUDA device"),
        (lines()[:1], "it did not end within 140 s", ["failed"] * 3, "it did not end within"),
        (lines()[:3], "it did not end within 140 s", ["passed", "passed", "failed"], "it did not end within"),
        (
            [*lines()[:3], {"part": "loopback", "number": 1, "error": "was killed by SIGBUS (7)"}],
            "",
            ["passed", "passed", "failed"],
            "rank 1: was killed by SIGBUS (7)",
        ),
        (
            [lines()[0], {"part": "compute", "number": 3, "error": "RuntimeError: ECC"}, *lines()[2:]],
            "",
            ["failed", "failed", "passed"],
            "device 3: RuntimeError: ECC",
        ),
    ]:
        found, is_slow, text = outcomes(some, usual(), problem)
        assert found == expected, detail
        assert not is_slow, detail  # Only slowness is measured again.
        assert detail in text, detail


def probe_of(*answers: list[dict]):
    left = list(answers)

    def probe(name, arguments, *, environment, deadline_s):
        assert name == "device_probe"
        return ProbeEnd(0, "".join(json.dumps(line) + "\n" for line in left.pop(0)), "", deadline_s)

    return probe, left


def test_slowness_counts_only_if_measured_twice(tmp_path: Path) -> None:
    probe, left = probe_of(lines(0.1), lines(0.02))
    findings = timed.check_speed(health_context(tmp_path, probe=probe), usual())
    assert [finding.outcome for finding in findings] == ["passed"] * 3
    assert not left
    probe, left = probe_of(lines(0.1), lines(0.09))
    findings = timed.check_speed(health_context(tmp_path, probe=probe), usual())
    assert [finding.outcome for finding in findings] == ["failed", "passed", "passed"]
    assert not left


def test_speed_is_not_measured_beside_workers(tmp_path: Path) -> None:
    probe, _ = probe_of()
    findings = timed.check_speed(health_context(tmp_path, probe=probe, is_training=True), usual())
    assert [finding.outcome for finding in findings] == ["skipped"] * 3


@pytest.mark.slow
def test_real_probe_measures_this_machine(tmp_path: Path) -> None:
    findings = timed.check_speed(health_context(tmp_path, device="cpu"), HealthHistory())
    assert [(finding.name, finding.outcome) for finding in findings] == [(name, "passed") for name in timed.NAMES]
    assert all(finding.value and finding.samples for finding in findings)


def test_torch_without_cuda_devices_fails_the_probe(tmp_path: Path) -> None:
    fake = "__version__ = '2.13'\nclass version: cuda = '12.8'\nclass cuda: device_count = staticmethod(lambda: 0)\n"
    (tmp_path / "torch.py").write_text(fake)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    findings = timed.check_speed(health_context(tmp_path, device="cuda", environment=environment), HealthHistory())
    assert [finding.outcome for finding in findings] == ["failed"] * 3
    assert "torch sees no CUDA device (torch 2.13 is built for CUDA 12.8)" in findings[0].detail


def test_torch_that_cannot_be_imported_fails_the_probe(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    findings = timed.check_speed(health_context(tmp_path, environment=environment), HealthHistory())
    assert [finding.outcome for finding in findings] == ["failed"] * 3
    assert "its probe ended with exit code 1: ImportError: libcudart.so.12" in findings[0].detail


# parts of a probe in forked children

FORKED = """
import os, signal
from megatrain_launcher.health import forked
from megatrain_launcher.health.forked import run_part
forked._GRACE_S = 0.1
def good(): return {"value": 1}
def bad(): raise RuntimeError("first line\\nsecond")
def dead(): os.kill(os.getpid(), 11)
def stuck(): signal.pause()
run_part("mixed", [good, bad], 10.0)
run_part("dead", [dead, stuck], 10.0)
run_part("stuck", [good, stuck], 0.3)
"""


def test_broken_measurement_leaves_the_others() -> None:
    end = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    found = measurements("noise\n[1]\n" + end.stdout)
    reported = {(line["part"], line.get("number")): line.get("error", "") for line in found}
    assert {key: error for key, error in reported.items() if key[1] is not None} == {
        ("mixed", 0): "",
        ("mixed", 1): "RuntimeError: first line",
        ("dead", 0): "was killed by SIGSEGV (11)",  # and no part of the one that waited for it
        ("stuck", 0): "",
        ("stuck", 1): "it did not end within 0.3 s",
    }
    loads = [line["others_busy"] for line in found if line["part"].endswith("-load")]
    assert len(loads) == 3
    assert all(load is None or 0 <= load <= 1 for load in loads)


def test_a_probe_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    package = tmp_path / "megatrain_launcher/health"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").touch()
    (package / "probe.py").write_text(
        "import os, signal\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True)\n"
        "signal.pause()\n"
    )  # fmt: skip
    end = run_probe("probe", [], environment={"PYTHONPATH": str(tmp_path)}, deadline_s=1.0)
    assert end.exit_code is None
    assert end.problem == "its probe did not end within 1 s"
    child = int(end.output)
    wait_until(lambda: not is_running(child), "the grandchild's end")


STARTER = """
import os, subprocess, sys
environment = {**os.environ, 'MEGATRAIN_PROBE_PARENT': str(os.getpid())}
child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], env=environment, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_probe_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import signal\n"
        "from megatrain_launcher.health.child import guard_probe\n"
        "guard_probe()\n"
        "print('guarded', flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            STARTER,
            script,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(DEADLINE_S)
    parent.stdout.close()
    wait_until(lambda: not is_running(child), "the probe's end")


# the file


def test_history_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "hosts" / "h" / "health.json"
    assert read_history(path) == (HealthHistory(), "")
    history = usual().with_findings(
        [HealthFinding("x", CheckOutcome.WARNING, "", samples={"a": 1.0}, seen={"gpus": 8.0})]
    )
    write_history(path, history)
    assert read_history(path) == (history, "")
    assert history.seen == {"gpus": 8.0}
    assert "a" not in history.samples  # of a failed check
    assert [file.name for file in path.parent.iterdir()] == ["health.json"]


def test_a_damaged_history_is_put_aside(tmp_path: Path) -> None:
    for content in [
        b"", b"{", b"[]", b"\xff\x00", b'{"schema_version": 2}', b'{"schema_version": 1, "samples": {"a": ["x"]}}',
        b'{"schema_version": 1, "seen": {"a": null}}', b'{"schema_version": 1, "samples": {"a": [NaN]}}',
        b"[" * 100_000,
    ]:  # fmt: skip
        path = tmp_path / "health.json"
        path.write_bytes(content)
        history, problem = read_history(path)
        assert history == HealthHistory(), content[:80]
        assert "put aside as health.damaged.json" in problem, content[:80]
        assert (tmp_path / "health.damaged.json").read_bytes() == content, content[:80]
        assert read_history(path) == (HealthHistory(), ""), content[:80]


@settings(max_examples=10)
@given(st.lists(st.tuples(st.just(0) | st.integers(1, 20), st.floats(0.001, 10)), min_size=80, max_size=100))
def test_history_is_bounded_and_its_usual_is_the_median(samples: list[tuple[int, float]]) -> None:
    history = HealthHistory()
    model: dict[str, list[float]] = {}
    for name, value in samples:
        finding = HealthFinding("x", CheckOutcome.PASSED, "", samples={str(name): value}, seen={str(name): value})
        history = history.with_findings([finding])
        model.setdefault(str(name), []).append(value)
    for key, values in model.items():
        kept = values[-MAX_SAMPLES:]
        assert history.samples[key] == tuple(kept)
        assert history.usual(key) == (median(kept) if len(kept) >= 3 else None)
        assert history.seen[key] == values[-1]


def test_history_drops_names_that_are_not_seen_any_more() -> None:
    history = HealthHistory()
    for number in range(MAX_NAMES + 10):
        seen = {f"link{number}": 1.0, "eth0": 2.0}
        history = history.with_findings([HealthFinding("x", CheckOutcome.PASSED, "", seen=seen, samples=seen)])
    assert len(history.seen) == len(history.samples) == MAX_NAMES
    assert "link0" not in history.seen
    assert {"eth0", f"link{MAX_NAMES + 9}"} <= history.seen.keys()
