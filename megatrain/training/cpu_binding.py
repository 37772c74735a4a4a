"""Binding a worker to cores: the same number of cores for each worker, or the NUMA node that is nearest to its GPU.

`choose_cores` is a pure function from a description of the host to a set of cores. `bind_process` reads the host,
calls it, and applies the result to all threads of the process. If possible, the caller binds before libraries start
their threads, because they size thread pools by the available cores. Memory is not bound: Linux allocates it on the
node of the core that first touches it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.system_files import system_text
from megatrain.formatting import count_text, ranges_text

CpuBinding = Literal["none", "core", "numa"]


@dataclass(frozen=True, slots=True)
class HostCores:
    """The logical cores that this process may use, with their NUMA nodes and physical cores."""

    allowed: tuple[int, ...]
    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """NUMA node -> its cores, allowed or not."""
    physical: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Logical core -> (package, physical core)."""


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """The cores to bind to; empty means that the process is not bound. `text` gives the decision and its reason."""

    cores: tuple[int, ...]
    text: str


def bind_process(cpu_binding: CpuBinding, local_rank: int, local_world_size: int, gpu_address: str = "") -> str:
    """Bind this process and its threads according to runtime.cpu_binding, and return a text about what was done.

    `gpu_address` is the PCI address of the rank's GPU, see `gpu_pci_address`; empty without a GPU.
    Raises: ConfigError when the system rejects the binding or does not support it.
    """
    if cpu_binding == "none":
        return "not bound to cores"
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError([f'runtime.cpu_binding="{cpu_binding}" needs Linux; use "none" on this system'])
    host = read_host_cores(Path("/sys"))
    gpu_node = read_gpu_node(gpu_address, Path("/sys"))
    choice = choose_cores(cpu_binding, host, local_rank, local_world_size, gpu_node)
    try:
        _apply(choice.cores)
    except OSError as error:
        problem = f'runtime.cpu_binding="{cpu_binding}": the system refuses cores {choice.cores}: {error.strerror}'
        raise ConfigError([f'{problem}; use "none"']) from error
    return choice.text


def choose_cores(
    cpu_binding: Literal["core", "numa"],
    host: HostCores,
    local_rank: int,
    local_world_size: int,
    gpu_node: int | None = None,
) -> CoreChoice:
    """Return the cores for one of the ranks of a host."""
    if cpu_binding == "core":
        return _core_share(host, local_rank, local_world_size)
    return _numa_node(host, local_rank, local_world_size, gpu_node)


def _core_share(host: HostCores, local_rank: int, local_world_size: int) -> CoreChoice:
    # By physical core, so that the two threads of one core belong to one rank; by number if that is unknown.
    cores = sorted(host.allowed, key=lambda core: (host.physical.get(core, (0, 0)), core))
    if local_world_size > len(cores):
        core = cores[local_rank % len(cores)]
        sharers = len(range(local_rank % len(cores), local_world_size, len(cores)))
        return CoreChoice(
            (core,),
            f"bound to core {core}, ranks on it: {sharers} ({local_world_size} ranks have "
            f"{count_text(len(cores), 'core')} here)",
        )
    # Each rank gets the same number of cores: ranks wait for each other, so one more core for some ranks would gain
    # nothing. The remaining cores stay free for other programs.
    size = len(cores) // local_world_size
    share = tuple(sorted(cores[local_rank * size : (local_rank + 1) * size]))
    return CoreChoice(share, f"bound to {_cores_text(share)}, share {local_rank + 1} of {local_world_size}")


def _numa_node(host: HostCores, local_rank: int, local_world_size: int, gpu_node: int | None) -> CoreChoice:
    allowed = set(host.allowed)
    # A node can have memory but no cores, or no cores that this process may use.
    nodes = {node: tuple(sorted(allowed.intersection(cores))) for node, cores in sorted(host.nodes.items())}
    usable = [node for node, cores in nodes.items() if cores]
    if not usable:
        return CoreChoice((), "not bound: this host does not report its NUMA nodes")
    if gpu_node in usable:
        node, reason = gpu_node, "the node of its GPU"
    else:
        node = usable[local_rank * len(usable) // local_world_size]
        reason = f"number {usable.index(node) + 1} of {len(usable)}, by rank"
    return CoreChoice(nodes[node], f"bound to {_cores_text(nodes[node])} of NUMA node {node} ({reason})")


def read_host_cores(sys_root: Path) -> HostCores:
    """Return the cores of this host from Linux's description under `sys_root`."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    nodes = {}
    for directory in (sys_root / "devices/system/node").glob("node[0-9]*"):
        nodes[int(directory.name.removeprefix("node"))] = parse_core_list(system_text(directory / "cpulist"))
    physical = {}
    for core in allowed:
        topology = sys_root / f"devices/system/cpu/cpu{core}/topology"
        package, number = system_text(topology / "physical_package_id"), system_text(topology / "core_id")
        if package.isdigit() and number.isdigit():
            physical[core] = (int(package), int(number))
    return HostCores(allowed, nodes, physical)


def read_gpu_node(gpu_address: str, sys_root: Path) -> int | None:
    """Return the NUMA node of a PCI device; None without a device or if its node is unknown (-1)."""
    text = system_text(sys_root / "bus/pci/devices" / gpu_address / "numa_node") if gpu_address else ""
    return int(text) if text.isdigit() else None


def gpu_pci_address(local_rank: int) -> str:
    """Return the PCI address of the CUDA device with this number, in the form of /sys/bus/pci/devices."""
    import torch  # imported here so that ranks without a GPU can be bound before torch starts threads

    device: Any = torch.cuda.get_device_properties(local_rank)  # torch's types lack the PCI address
    return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"


def set_threads(threads: int) -> int:
    """Set torch's number of threads (0 leaves torch's own choice), and return the number that it uses."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    return int(torch.get_num_threads())


def parse_core_list(text: str) -> tuple[int, ...]:
    """Return the cores of a list such as 0-3,8,10-11; an empty text has none."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _cores_text(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {ranges_text(cores)}"


def _apply(cores: Sequence[int]) -> None:
    if not cores:
        return
    # New threads inherit the cores of the thread that starts them; threads that libraries have already started are
    # bound one by one.
    os.sched_setaffinity(0, cores)
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended in the meantime
            os.sched_setaffinity(int(name), cores)
