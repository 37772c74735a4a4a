"""The doctor: every state of the machine has a line and a consequence, and only an unusable machine fails."""

from __future__ import annotations

import importlib
import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatrain.cli import main
from megatrain.commands.doctor import dali_report, machine, software, torch_report
from megatrain.commands.doctor.finding import DoctorFinding, FindingLevel
from megatrain.data.pictures.dali_package import FoundDali, find_dali
from megatrain.ops.extension import load_extension, missing_capability
from megatrain.ops.optional_backends import FoundBackend
from tests.helpers.backend_packages import PYPI_APEX, write_packages

REPORT = {
    "version": "2.13.0+cu130",
    "cuda_build": "13.0",
    "is_cuda_available": True,
    "devices": [{"name": "NVIDIA H100", "capability": "9.0", "memory_bytes": 80 << 30, "missing_capability": ""}],
    "kernels": {"architectures": ["8.0", "9.0a"], "reason": ""},
    "host_kernels": {"is_built": True, "missing": [], "unlike_torch": [], "slow_here": []},
    "has_gloo": True,
    "has_nccl": True,
    "nccl_version": "2.29.1",
}


def describe(**changes: object) -> dict[str, DoctorFinding]:
    findings = torch_report.describe_torch({**REPORT, **changes}, "")
    return {finding.name: finding for finding in findings}


@pytest.mark.slow
def test_doctor_reports_that_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert document["schema_version"] == 1
    assert document["can_train"] is True
    states = {finding["name"]: finding["level"] for finding in document["findings"]}
    assert states["torch"] == states["python"] == states["numpy"] == states["gloo"] == "ok"
    assert {
        "compiler",
        "nvcc",
        "gpu driver",
        "etcd",
        "launcher",
        "nvidia-ml-py",
        "tokenizers",
        "apex (NVIDIA)",
        "transformer-engine",
        "NVIDIA DALI",
        "cuda kernels",
        "cores",
        "memory",
    } <= set(states)


def test_table_marks_what_is_fatal_and_exit_code_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_report, "probe_torch", lambda: (None, "not installed"))

    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "XX  torch " in out
    assert "training needs it" in out
    assert out.endswith("megatrain cannot train here: fix the findings marked XX.\n")


NO_GPU: dict[str, object] = {"is_cuda_available": False, "devices": []}
UNBUILT: dict[str, object] = {"kernels": {"architectures": [], "reason": "megatrain._C was not built"}}
FOR_ANOTHER_GPU: dict[str, object] = {
    "kernels": {"architectures": ["8.0"], "reason": ""},
    "devices": [REPORT["devices"][0] | {"missing_capability": missing_capability(("8.0",), (9, 0))}],
}
OK, ABSENT, WARNING, FATAL = FindingLevel.OK, FindingLevel.ABSENT, FindingLevel.WARNING, FindingLevel.FATAL


@pytest.mark.parametrize(
    ("changes", "name", "level", "state", "consequence"),
    [
        ({}, "gpu", OK, "1: NVIDIA H100 (capability 9.0, 80 GiB)", ""),
        ({}, "nccl", OK, "2.29.1", ""),
        (NO_GPU, "gpu", WARNING, "", "training runs on CPU with gloo"),
        (NO_GPU | {"cuda_build": None}, "torch", OK, "2.13.0+cu130, built for CPU", ""),
        (NO_GPU | {"cuda_build": None, "has_nccl": False, "nccl_version": None}, "gpu", ABSENT, "", ""),
        (NO_GPU | {"cuda_build": None, "has_nccl": False, "nccl_version": None}, "nccl", ABSENT, "", ""),
        (UNBUILT, "cuda kernels", WARNING, "megatrain._C was not built", "slower"),
        (UNBUILT, "cuda kernels", WARNING, "", "MEGATRAIN_CUDA=1 pip install"),
        (UNBUILT | NO_GPU, "cuda kernels", ABSENT, "", ""),
        (
            FOR_ANOTHER_GPU, "cuda kernels", WARNING, "compiled for compute capability 8.0",
            "install megatrain again with TORCH_CUDA_ARCH_LIST=9.0",
        ),
        ({"version": "2.10.1"}, "torch", FATAL, "", ""),
        ({"version": "2.11.0"}, "torch", OK, "", ""),
        ({"version": "3.0.0a0"}, "torch", OK, "", ""),
        ({"has_gloo": False}, "gloo", WARNING, "", ""),
        ({"has_gloo": False, "has_nccl": False}, "gloo", FATAL, "", ""),
    ],
)  # fmt: skip
def test_findings_about_torch(
    changes: dict[str, object], name: str, level: FindingLevel, state: str, consequence: str
) -> None:
    finding = describe(**changes)[name]
    assert finding.level is level
    assert not state or finding.state == state
    assert consequence in finding.consequence


def test_gpu_machine_has_no_warning() -> None:
    assert {finding.level for finding in describe().values()} == {OK}


def test_which_gpus_run_code_built_for_others() -> None:
    cases: list[tuple[tuple[str, ...], tuple[int, int], bool]] = [
        (("8.0", "9.0a"), (8, 0), True),
        (("8.0", "9.0a"), (8, 9), True),
        (("8.0", "9.0a"), (9, 0), True),
        (("8.0", "9.0a"), (7, 5), False),
        (("8.0", "9.0a"), (10, 0), False),
        (("9.0a",), (9, 1), False),
        (("8.6",), (8, 0), False),
        (("8.0+PTX",), (12, 0), True),
        (("8.0+PTX",), (7, 5), False),
        (("9.0a+PTX",), (9, 0), True),
        (("9.0a+PTX",), (10, 0), False),
        (("10.0f",), (10, 3), True),
        (("10.0f",), (11, 0), False),
        (("90", "8.0"), (8, 6), True),
    ]
    for architectures, capability, runs in cases:
        assert (missing_capability(architectures, capability) == "") is runs, (architectures, capability)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('nonsense inside')", "megatrain._C does not load: ValueError: nonsense inside"),
        ("architectures, has_current_stream = '9.0a', 0", "megatrain._C does not find torch's current stream: build"),
        ("architectures = '9.0a'", "megatrain._C does not find torch's current stream: build it again with this torch"),
        ("architectures, has_current_stream = '9.0a', 1", ""),
    ],
)
def test_kernels_that_cannot_be_used_are_a_reason_and_no_error(
    source: str, reason: str, package_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package_root / "kernels.py").write_text(f"{source}\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        importlib, "import_module", lambda name: SimpleNamespace(**runpy.run_path(str(package_root / "kernels.py")))
    )

    found = load_extension.__wrapped__()
    assert found.reason.startswith(reason)
    assert found.is_active is (reason == "")


def test_old_python_and_small_limits_have_their_levels() -> None:
    assert torch_report.python_finding((3, 10, 4)).level is FATAL
    assert torch_report.python_finding((3, 11, 0)).level is OK
    assert machine.open_files_finding(1024).level is WARNING
    assert machine.open_files_finding(1 << 20).level is OK
    assert machine.open_files_finding(-1).state == "unlimited"
    assert software.queues_findings({}) == software.queues_findings({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == []
    (finding,) = software.queues_findings({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert (finding.name, finding.state, finding.level) == ("gpu queues", "1", WARNING)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            r"printf 'libcudart.so: undefined symbol \374\n' >&2; exit 3",
            (None, "installed, but importing it failed with exit code 3: libcudart.so: undefined symbol \ufffd"),
        ),
        (r"""printf 'hello\ntorch-report {"version": "2.13.0"}\nbye \374\n'""", ({"version": "2.13.0"}, "")),
        ("echo hello", (None, "installed, but the process that imports it reported nothing")),
        ("exit 0", (None, "installed, but the process that imports it reported nothing")),
    ],
    ids=["crash", "lines of other packages", "no report", "nothing"],
)
def test_output_of_the_process_that_imports_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, expected: object
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(torch_report.sys, "executable", str(program))
    assert torch_report.probe_torch() == expected


def test_optional_backends_are_there_absent_or_something_else() -> None:
    home = Path("/site-packages/apex")
    there = software.backend_finding("apex (NVIDIA)", 'kernels.norm="apex"', FoundBackend(home, "0.1"))
    absent = software.backend_finding(
        "apex (NVIDIA)", 'kernels.norm="apex"', FoundBackend(None, "", "NVIDIA apex is not installed", "build it")
    )
    other = software.backend_finding(
        "apex (NVIDIA)", 'kernels.norm="apex"', FoundBackend(home, "", "the apex there is not NVIDIA's", "uninstall it")
    )
    unbuilt = software.backend_finding(
        "apex (NVIDIA)", 'kernels.norm="apex"', FoundBackend(home, "0.1", "it has no kernels", "build it")
    )

    used = 'used if the configuration has kernels.norm="apex", on a GPU only'
    assert there == DoctorFinding("apex (NVIDIA)", "0.1 (/site-packages/apex)", used)
    assert (absent.state, absent.level) == ("not installed", ABSENT)
    assert absent.consequence == 'only kernels.norm="apex" needs it: build it'
    assert (other.state, other.level) == ("another package at /site-packages/apex", WARNING)
    assert other.consequence == 'kernels.norm="apex" is refused, the apex there is not NVIDIA\'s: uninstall it'
    assert (unbuilt.state, unbuilt.level) == ("0.1 (/site-packages/apex)", WARNING)


def test_pypis_apex_is_reported_as_another_package(package_root: Path) -> None:
    write_packages(package_root, PYPI_APEX)
    findings = {finding.name: finding for finding in software.software_findings()}

    assert findings["apex (NVIDIA)"].state == f"another package at {package_root / 'apex'}"
    assert "is not NVIDIA's" in findings["apex (NVIDIA)"].consequence


@pytest.mark.parametrize(
    ("found", "report", "problem", "expected"),
    [
        (
            FoundDali(problem="NVIDIA DALI is not installed", hint="pip install it"), None, "",
            ("NVIDIA DALI is not installed", ABSENT, "only pictures need it"),
        ),
        (
            FoundDali("nvidia-dali-cuda130", "2.4.0"), {"cpu": "", "mixed": "no GPU"}, "",
            ("nvidia-dali-cuda130 2.4.0", OK, "device=cpu; not with mixed: no GPU"),
        ),
        (
            FoundDali("nvidia-dali-cuda130", "2.4.0"), {"cpu": "", "mixed": ""}, "",
            ("nvidia-dali-cuda130 2.4.0", OK, "device=cpu and mixed"),
        ),
        (
            FoundDali("nvidia-dali-cuda130", "2.4.0"), {"cpu": "bad", "mixed": "bad"}, "",
            ("nvidia-dali-cuda130 2.4.0", WARNING, "decodes no picture"),
        ),
        (
            FoundDali("nvidia-dali-cuda130", "2.4.0"), None, "it did not answer",
            ("it did not answer", WARNING, "only pictures need it"),
        ),
    ],
)  # fmt: skip
def test_dali_is_there_absent_or_without_a_device(
    found: FoundDali, report: dict[str, str] | None, problem: str, expected: tuple[str, FindingLevel, str]
) -> None:
    finding = dali_report.describe_dali(found, report, problem)
    assert (finding.state, finding.level) == expected[:2]
    assert expected[2] in finding.consequence


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([], ("", "NVIDIA DALI is not installed")),
        (["nvidia-dali"], ("", "the package nvidia-dali is a placeholder without code")),
        (["nvidia-dali", "nvidia_dali_cuda130"], ("nvidia-dali-cuda130", "has no module nvidia.dali")),
        (["nvidia-dali-cuda120", "nvidia-dali-cuda130"], ("nvidia-dali-cuda130", "installed over each other")),
    ],
)
def test_dali_is_found_by_its_packages(
    packages: list[str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [SimpleNamespace(name=name, version="2.4.0") for name in packages]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = find_dali()
    assert found.package == expected[0]
    assert expected[1] in found.problem
    assert "pip install 'megatrain[dali]'" in found.hint


def test_driver_version_is_read(tmp_path: Path) -> None:
    version = tmp_path / "version"
    assert software.driver_finding(version).level is ABSENT
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC 12\n")
    assert software.driver_finding(version).state == "580.82.07"
    version.write_bytes(b"NVIDIA \xfc\n")
    assert software.driver_finding(version).state == "NVIDIA \ufffd"
    version.write_bytes(b"")
    assert software.driver_finding(version).state == "unknown version"


def test_programs_on_the_path_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    monkeypatch.delenv("CXX", raising=False)
    assert software.compiler_finding().level is ABSENT

    for name, text in (
        ("c++", "c++ 12.2"),
        ("etcd", "etcd Version: 3.6.4"),
        ("nvcc", "Cuda compilation tools, release 13.0, V13.0.48"),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)

    assert software.compiler_finding().state == f"c++ 12.2 ({tmp_path}/c++)"
    assert software.etcd_finding(None).state == f"etcd Version: 3.6.4 ({tmp_path}/etcd)"
    assert software.nvcc_finding([]).state == f"13.0 ({tmp_path}/nvcc)"


def test_nvcc_of_a_python_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    nvcc = tmp_path / "site-packages" / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.80'\n")
    nvcc.chmod(0o755)

    packages = [str(tmp_path), str(tmp_path / "site-packages")]
    assert software.nvcc_finding([], str(tmp_path)).level is ABSENT
    assert software.nvcc_finding(packages, str(tmp_path)).state == f"13.1 ({nvcc})"


def test_launcher_and_its_etcd_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.launcher_finding(tmp_path) == DoctorFinding("launcher", str(tmp_path))
    for absent in (software.launcher_finding(None), software.etcd_finding(None), software.etcd_finding(tmp_path)):
        assert absent.level is ABSENT
        assert "torchrun" in absent.consequence

    program = tmp_path / "etcdbin" / "etcd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'etcd Version: 3.5.1'\n")
    program.chmod(0o755)
    assert software.etcd_finding(tmp_path).state == f"etcd Version: 3.5.1 ({program})"


def test_etcd_that_loses_acknowledged_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "etcd"
    for version, level in (
        ("3.4.20", WARNING),
        ("3.4.23", OK),
        ("3.5.4", WARNING),
        ("3.5.5", OK),
        ("3.6.4", OK),
        ("unknown", OK),
    ):
        program.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
        program.chmod(0o755)
        found = software.etcd_finding(None)
        assert found.level is level, version
        assert ("3.5.5 or later" in found.consequence) == (level is WARNING), version


def test_the_diagnosis_is_there_missing_or_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert software.diagnostics_finding(tmp_path) == DoctorFinding("diagnostics", str(tmp_path))
    assert "`megatrain diag` and /metrics are missing" in software.diagnostics_finding(None).consequence

    monkeypatch.setattr(software, "DIAGNOSTICS_PACKAGES", ("json", "no_such_package"))
    found = software.diagnostics_finding(tmp_path)
    assert (found.state, found.level) == ("without no_such_package", ABSENT)
    assert "pip install 'megatrain[diagnostics]'" in found.consequence


def test_container_limits_are_shown(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{4 << 30}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")

    assert machine.cores_finding(8, 4, tmp_path / "cpu.max").state == (
        "8, 4 allowed by CPU affinity, limited to 1.5 by the container"
    )
    assert machine.memory_finding(tmp_path / "meminfo", tmp_path / "memory.max").state == (
        "16.0 GiB, 8.0 GiB available, limited to 4.0 GiB by the container"
    )


def test_missing_limits_and_files_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")

    assert machine.cores_finding(2, 2, tmp_path / "cpu.max").state == "2"
    assert machine.memory_finding(tmp_path / "absent", tmp_path / "absent").state == "unknown"
    assert machine.numa_finding(tmp_path / "absent").state == "unknown"
    assert machine.network_finding(tmp_path / "absent", tmp_path / "absent").state == "unknown"
    assert machine.shared_memory_finding(tmp_path / "absent").level is WARNING


def test_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = os.statvfs(tmp_path)
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, *tuple(blocks)[5:]))
    monkeypatch.setattr(machine.os, "statvfs", lambda path: small)

    finding = machine.shared_memory_finding(tmp_path)

    assert finding.level is WARNING
    assert finding.state == "0.1 GiB, 0.1 GiB free"


def test_numa_nodes_and_networks_are_listed(tmp_path: Path) -> None:
    for number, cores in ((0, "0-31"), (1, "32-63"), (10, "64-95")):
        (tmp_path / "node" / f"node{number}").mkdir(parents=True)
        (tmp_path / "node" / f"node{number}" / "cpulist").write_text(cores + "\n")
    for name, speed in (("eth0", "100000"), ("eth1", "-1"), ("lo", "")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text("up\n")
        (tmp_path / "net" / name / "speed").write_text(speed)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)

    assert machine.numa_finding(tmp_path / "node").state == "3 (0: cores 0-31, 1: cores 32-63, 10: cores 64-95)"
    network = machine.network_finding(tmp_path / "net", tmp_path / "infiniband")
    assert network.state == "eth0 (up 100000 Mbit/s), eth1 (up), lo (up); RDMA: mlx5_0"
    assert "runtime.network_interface" in network.consequence
