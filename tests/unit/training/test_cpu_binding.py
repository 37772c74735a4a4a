"""Binding to cores: the choice on simulated hosts, a host read from files, and the affinity of a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.training.cpu_binding import (
    HostCores,
    bind_process,
    choose_cores,
    parse_core_list,
    read_gpu_node,
    read_host_cores,
)
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

PLAIN = HostCores(allowed=tuple(range(8)))
# Two sockets of 4 physical cores; the second thread of core i is i + 8, as on most servers.
THREADED = HostCores(
    allowed=tuple(range(16)),
    nodes={0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)},
    physical={core: (core % 8 // 4, core % 4) for core in range(16)},
)
# Node 2 has memory only; the container may use one core of node 1.
CONTAINER = HostCores(allowed=(0, 1, 5), nodes={0: (0, 1, 2, 3), 1: (4, 5, 6, 7), 2: ()})
FOUR_NODES = HostCores(allowed=tuple(range(8)), nodes={node: (2 * node, 2 * node + 1) for node in range(4)})


def cores_of_ranks(cpu_binding: Literal["core", "numa"], host: HostCores, num_ranks: int) -> list[tuple[int, ...]]:
    return [choose_cores(cpu_binding, host, rank, num_ranks).cores for rank in range(num_ranks)]


def test_core_gives_equal_shares() -> None:
    assert cores_of_ranks("core", PLAIN, 1) == [tuple(range(8))]
    assert cores_of_ranks("core", PLAIN, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cores_of_ranks("core", PLAIN, 3) == [(0, 1), (2, 3), (4, 5)]
    assert cores_of_ranks("core", PLAIN, 8) == [(core,) for core in range(8)]
    assert cores_of_ranks("core", THREADED, 4) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    assert cores_of_ranks("core", CONTAINER, 3) == [(0,), (1,), (5,)]
    assert cores_of_ranks("core", CONTAINER, 5) == [(0,), (1,), (5,), (0,), (1,)]


def test_numa_gives_nodes_in_blocks_of_ranks() -> None:
    assert cores_of_ranks("numa", THREADED, 2) == [THREADED.nodes[0], THREADED.nodes[1]]
    assert cores_of_ranks("numa", THREADED, 5) == [THREADED.nodes[node] for node in (0, 0, 0, 1, 1)]
    assert cores_of_ranks("numa", THREADED, 1) == [THREADED.nodes[0]]
    assert cores_of_ranks("numa", CONTAINER, 4) == [(0, 1), (0, 1), (5,), (5,)]
    assert cores_of_ranks("numa", FOUR_NODES, 2) == [(0, 1), (4, 5)]
    assert cores_of_ranks("numa", PLAIN, 2) == [(), ()]


def test_numa_goes_to_the_gpu() -> None:
    for gpu_node, cores, reason in (
        (1, (4, 5, 6, 7, 12, 13, 14, 15), "the node of its GPU"),
        (None, (0, 1, 2, 3, 8, 9, 10, 11), "number 1 of 2, by rank"),
        (7, (0, 1, 2, 3, 8, 9, 10, 11), "number 1 of 2, by rank"),
    ):
        choice = choose_cores("numa", THREADED, 0, 2, gpu_node)
        assert choice.cores == cores, gpu_node
        assert reason in choice.text, gpu_node


def test_the_choice_is_explained() -> None:
    def text(cpu_binding: Literal["core", "numa"], host: HostCores, rank: int, num_ranks: int) -> str:
        return choose_cores(cpu_binding, host, rank, num_ranks).text

    assert text("core", THREADED, 1, 4) == "bound to cores 2-3, 10-11, share 2 of 4"
    assert text("core", CONTAINER, 4, 5) == "bound to core 1, ranks on it: 2 (5 ranks have 3 cores here)"
    assert text("core", CONTAINER, 2, 5) == "bound to core 5, ranks on it: 1 (5 ranks have 3 cores here)"
    assert text("numa", CONTAINER, 0, 2) == "bound to cores 0-1 of NUMA node 0 (number 1 of 2, by rank)"
    assert text("numa", PLAIN, 0, 2) == "not bound: this host does not report its NUMA nodes"


def test_core_list_is_parsed() -> None:
    assert parse_core_list("") == ()
    assert parse_core_list("3") == (3,)
    assert parse_core_list("0-3,8,10-11") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_core_list("0-0") == (0,)


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    """A host of two nodes; this process's first core has a separate place, and a GPU is attached to node 1."""
    first = min(os.sched_getaffinity(0))
    files = {
        "devices/system/node/node0/cpulist": "0-63\n",
        "devices/system/node/node1/cpulist": "64-127\n",
        f"devices/system/cpu/cpu{first}/topology/physical_package_id": "1\n",
        f"devices/system/cpu/cpu{first}/topology/core_id": "17\n",
        "bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:2b:00.0/numa_node": "-1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_host_cores_are_read_from_files(sys_root: Path) -> None:
    host = read_host_cores(sys_root)

    assert host.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert host.nodes == {0: tuple(range(64)), 1: tuple(range(64, 128))}
    assert host.physical == {host.allowed[0]: (1, 17)}


def test_gpu_node_is_read(sys_root: Path) -> None:
    assert read_gpu_node("0000:1b:00.0", sys_root) == 1
    assert read_gpu_node("0000:2b:00.0", sys_root) is None
    assert read_gpu_node("0000:3b:00.0", sys_root) is None
    assert read_gpu_node("", sys_root) is None


BIND = """
import json, os, sys, threading
from megatrain.training.cpu_binding import bind_process
release, ready = threading.Event(), threading.Event()
earlier = {}
def wait():
    earlier["id"] = threading.get_native_id()
    ready.set()
    release.wait()
threading.Thread(target=wait, daemon=True).start()
ready.wait()
text = bind_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print(json.dumps([text, sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(earlier["id"]))]))
release.set()
"""


def bind_in_a_process(cpu_binding: str, rank: int, num_ranks: int) -> tuple[str, list[int], list[int]]:
    command = [sys.executable, "-c", BIND, cpu_binding, str(rank), str(num_ranks)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True)
    text, own, earlier = json.loads(done.stdout)
    return text, own, earlier


def test_every_thread_is_bound() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    text, own, earlier = bind_in_a_process("core", len(allowed) - 1, len(allowed))

    assert len(own) == 1
    assert earlier == own
    assert text == f"bound to core {own[0]}, share {len(allowed)} of {len(allowed)}"


def test_binding_none_changes_no_affinity() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    assert bind_in_a_process("none", 0, 2) == ("not bound to cores", allowed, allowed)


def test_refused_binding_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _cores: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(ConfigError, match=r'cpu_binding="core": the system refuses cores .*not permitted; use "none"'):
        bind_process("core", 0, 1)


def test_a_system_without_affinity_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match='needs Linux; use "none"'):
        bind_process("numa", 0, 1)


@pytest.mark.slow
def test_threads_of_torch_are_set() -> None:
    script = (
        "from megatrain.training.cpu_binding import set_threads; import torch\n"
        "print(set_threads(3), torch.get_num_threads(), set_threads(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.split() == ["3", "3", "3"]
