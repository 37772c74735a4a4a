"""Output of other programs: damage is reported and other lines are kept; control characters are escaped."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_diagnostics.devices.dcgm import DcgmExporter
from megatrain_job.devices.links import read_links
from megatrain_launcher.etcd.program import last_errors
from megatrain_launcher.health.memory import read_sizes
from megatrain_launcher.health.nvidia_smi import read_nvidia_smi
from megatrain_launcher.hosts.slurm import SlurmPlatform
from megatrain_launcher.logs.program_log import PrintableFormatter


class Others:
    """Lets each parser read its program's output. A result: (the values, the part of the rest that is shown)."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._root, self._monkeypatch, self._caplog = root, monkeypatch, caplog

    def nvidia_smi(self, text: str) -> tuple[Any, str]:
        (self._root / "output").write_text(text)
        program = self._root / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n/bin/cat {self._root}/output\n")
        program.chmod(0o755)
        self._monkeypatch.setenv("PATH", str(self._root))
        found = read_nvidia_smi(30.0)
        assert found is not None
        return [gpu.uuid for gpu in found.gpus], found.error

    def dcgm(self, text: str) -> tuple[Any, str]:
        self._caplog.clear()
        with self._caplog.at_level(logging.WARNING):
            found = DcgmExporter("http://localhost:9400/metrics", lambda _: text).read()
        values = [(gpu.index, gpu.temperature_c) for gpu in found.gpus]
        return values, " ".join([found.error, *self._caplog.messages]).strip()

    def etcd(self, text: str) -> tuple[Any, str]:
        return None, last_errors(text)

    def meminfo(self, text: str) -> tuple[Any, str]:
        (self._root / "meminfo").write_text(text)
        return read_sizes(self._root / "meminfo"), ""

    def rdma_rate(self, text: str) -> tuple[Any, str]:
        return self._port("rate", text).speed_mbps, ""

    def rdma_counter(self, text: str) -> tuple[Any, str]:
        return self._port("counters/link_downed", text).num_downs, ""

    def rdma_state(self, text: str) -> tuple[Any, str]:
        port = self._port("state", text)
        return port.is_up, port.state

    def slurm(self, text: str) -> tuple[Any, str]:
        facts = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
        return dict(SlurmPlatform({**facts, "SLURM_TOPOLOGY_ADDR": text}).facts().labels), ""

    def _port(self, name: str, text: str) -> Any:
        port = self._root / "class/infiniband/mlx5_0/ports/1"
        (port / "counters").mkdir(parents=True, exist_ok=True)
        for file, value in {"state": "4: ACTIVE", "rate": "400 Gb/sec", "counters/link_downed": "1"}.items():
            (port / file).write_text(value)
        (port / name).write_text(text)
        (found,) = read_links(self._root)
        return found


def smi(index: object) -> str:
    return f"{index}, GPU-{index}, H100, 550.54, 0, [N/A], No, No\n"


def dcgm(gpu: object, value: object = 60) -> str:
    return f'DCGM_FI_DEV_GPU_TEMP{{gpu="{gpu}",UUID="GPU-{gpu}"}} {value}\n'


COMPLAINT = json.dumps({"level": "error", "msg": "disk is slow"})
NO_FIELDS = "the page has no GPU fields"
UNREADABLE = "lines of the page cannot be read and are skipped, the first: "
CASES: list[tuple[Callable[[Others, str], tuple[Any, str]], str, Any, str]] = [
    (Others.nvidia_smi, smi(0) + smi(1), ["GPU-0", "GPU-1"], ""),
    (Others.nvidia_smi, smi(0) + "1, GPU-1, H100\n" + smi(2), ["GPU-0", "GPU-2"], "be read: 1, the first: '1, GPU-1,"),
    (Others.nvidia_smi, smi("nan") + smi(2), ["GPU-2"], "be read: 1, the first: 'nan, GPU-nan"),
    (Others.nvidia_smi, smi("\u00b2") + smi("x") + smi(2), ["GPU-2"], "be read: 2, the first: "),
    (Others.nvidia_smi, '0, "GPU-0, H100\n' + smi(1), ["GPU-1"], "be read: 1, the first: "),
    (Others.nvidia_smi, "", [], "it names no GPU"),
    (Others.dcgm, dcgm(0) + dcgm(1), [(0, 60.0), (1, 60.0)], ""),
    (Others.dcgm, dcgm(0) + 'DCGM_FI_DEV_GPU_TEMP{gpu="1"\n', [(0, 60.0)], f"1 {UNREADABLE}"),
    (Others.dcgm, 'DCGM_FI_DEV_GPU_TEMP{UUID="x"} 3\n' + dcgm(1), [(1, 60.0)], f"1 {UNREADABLE}"),
    (Others.dcgm, dcgm(0) + dcgm(1, "NaN") + dcgm(2, "+Inf"), [(0, 60.0)], f"2 {UNREADABLE}"),
    (Others.dcgm, dcgm(0) + 'DCGM_FI_DEV_NVSWITCH_TEMP{nvswitch="0"} 3\n', [(0, 60.0)], ""),
    (Others.dcgm, dcgm("nan"), [], NO_FIELDS),
    (Others.dcgm, "", [], NO_FIELDS),
    (Others.etcd, f"garbage\n{COMPLAINT}\n", None, "disk is slow"),
    (Others.etcd, f'{COMPLAINT}\n{{"level": "error"}}\n', None, "disk is slow"),
    (Others.etcd, f'{{"level": NaN}}\n{COMPLAINT}\n', None, "disk is slow"),
    (Others.etcd, f'{{"level": []}}\n{COMPLAINT}\n', None, "disk is slow"),
    (Others.etcd, "", None, "(it is empty)"),
    (Others.meminfo, "MemTotal: 8 kB\ngarbage\nx: y\nMemAvailable: 4 kB\n", (8192, 4096), ""),
    (Others.meminfo, "MemTotal:\nMemAvailable: 4 kB\n", None, ""),
    (Others.meminfo, "MemTotal: nan kB\nMemAvailable: 4 kB\n", None, ""),
    (Others.meminfo, "", None, ""),
    (Others.rdma_rate, "400 Gb/sec (4X NDR)", 400_000.0, ""),
    (Others.rdma_rate, "1.2.3 Gb/sec", None, ""),
    (Others.rdma_rate, "NaN Gb/sec", None, ""),
    (Others.rdma_rate, "", None, ""),
    (Others.rdma_counter, "7\n", 7, ""),
    (Others.rdma_counter, "nan", None, ""),
    (Others.rdma_counter, "\u00b2", None, ""),
    (Others.rdma_counter, "", None, ""),
    (Others.rdma_state, "", False, "unknown"),
    (Others.rdma_state, "garbage", False, "garbage"),
    (Others.slurm, "s0.s3.n1", {}, ""),
    (Others.slurm, "s0.n1", {"switch": "s0"}, ""),
    (Others.slurm, "n1", {}, ""),
    (Others.slurm, "", {}, ""),
]
"""The parser, its program's output, the parsed values, and the part of the rest that is shown."""


def test_damaged_output_costs_only_its_lines_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = Others(tmp_path, monkeypatch, caplog)
    for parse, text, expected, shown in CASES:
        found, rest = parse(others, text)
        assert found == expected, (parse.__name__, text)
        assert shown in rest if shown else not rest or parse is Others.rdma_state, (parse.__name__, text, rest)


def test_control_characters_of_ranks_are_shown() -> None:
    formatter = PrintableFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord(
        "megatrain", logging.INFO, "", 1, "rank %d: %s", (3, "a\x1b]0;title\x07\x9b31m b\r"), None
    )
    assert formatter.format(record) == "INFO rank 3: a\\x1b]0;title\\x07\\x9b31m b\\r"
