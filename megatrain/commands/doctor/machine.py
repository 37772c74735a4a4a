"""Cores, memory, NUMA, network interfaces and limits. On systems other than Linux, some are "unknown".

Every function takes the directory that it reads, so that tests can pass another one.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from megatrain.commands.doctor.finding import DoctorFinding, FindingLevel
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory
from megatrain.contracts.files.system_files import system_text
from megatrain.run_files.run_directory import own_box_directory

GIB = 1 << 30
MIB = 1 << 20

# The default black box holds 65,536 records: a few MiB a rank. 64 MiB is the default of a Docker container.
SMALL_SHM_BYTES = 256 * MIB
# A rank opens a socket to each peer of each group, plus files and libraries.
SMALL_OPEN_FILES = 4096


def machine_findings() -> list[DoctorFinding]:
    """Return the findings about the machine itself."""
    sys_root = Path("/sys")
    return [
        cores_finding(os.cpu_count() or 1, _allowed_cores(), sys_root / "fs/cgroup/cpu.max"),
        memory_finding(Path("/proc/meminfo"), sys_root / "fs/cgroup/memory.max"),
        shared_memory_finding(Path("/dev/shm")),
        numa_finding(sys_root / "devices/system/node"),
        network_finding(sys_root / "class/net", sys_root / "class/infiniband"),
        open_files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]


def cores_finding(num_cores: int, num_allowed: int, cgroup_limit: Path) -> DoctorFinding:
    """Return the number of cores, how many this process may use, and the container's limit."""
    state = f"{num_cores}"
    if num_allowed < num_cores:
        state += f", {num_allowed} allowed by CPU affinity"
    quota, _, period = system_text(cgroup_limit).partition(" ")
    if quota.isdigit() and period.isdigit():
        state += f", limited to {int(quota) / int(period):g} by the container"
    return DoctorFinding("cores", state)


def memory_finding(meminfo: Path, cgroup_limit: Path) -> DoctorFinding:
    """Return the RAM, total and available, and the container's limit."""
    fields = {
        key: value.split() for key, _, value in (line.partition(":") for line in system_text(meminfo).splitlines())
    }
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return DoctorFinding("memory", "unknown", "", FindingLevel.ABSENT)
    total, available = (int(fields[key][0]) * 1024 for key in ("MemTotal", "MemAvailable"))  # /proc counts KiB
    state = f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB available"
    limit = system_text(cgroup_limit)
    if limit.isdigit():
        state += f", limited to {int(limit) / GIB:.1f} GiB by the container"
    return DoctorFinding("memory", state)


def shared_memory_finding(directory: Path) -> DoctorFinding:
    """Return the size of the tmpfs that holds the black boxes."""
    name = str(directory)
    try:
        status = os.statvfs(directory)
        with suppress(FileNotFoundError):  # the directory is created with the first black box
            check_own_directory(own_box_directory(directory))
    except OSError as error:
        what = f"{error.filename} {error.strerror}" if isinstance(error, NotOwnError) else error.strerror
        consequence = 'name another directory for the black boxes (telemetry.black_box_directory, "" = none)'
        return DoctorFinding(name, f"not usable: {what}", consequence, FindingLevel.WARNING)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    state = f"{size / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    if free < SMALL_SHM_BYTES:
        consequence = "black boxes and NCCL share this memory: in a container, increase it with --shm-size"
        return DoctorFinding(name, state, consequence, FindingLevel.WARNING)
    return DoctorFinding(name, state)


def numa_finding(nodes_directory: Path) -> DoctorFinding:
    """Return the NUMA nodes and the cores of each."""
    node_directories = sorted(nodes_directory.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    if not node_directories:
        return DoctorFinding("numa", "unknown", "", FindingLevel.ABSENT)
    cores = ", ".join(f"{path.name[4:]}: cores {system_text(path / 'cpulist')}" for path in node_directories)
    consequence = 'runtime.cpu_binding = "numa" binds each rank to one node' if len(node_directories) > 1 else ""
    return DoctorFinding("numa", f"{len(node_directories)} ({cores})", consequence)


def network_finding(net_directory: Path, infiniband_directory: Path) -> DoctorFinding:
    """Return the network interfaces with their state, their speed if the driver reports it, and the RDMA devices."""
    try:
        interfaces = sorted(net_directory.iterdir())
    except OSError:
        return DoctorFinding("network", "unknown", "", FindingLevel.ABSENT)
    parts = []
    for interface in interfaces:
        speed = system_text(interface / "speed")
        known_speed = f" {speed} Mbit/s" if speed.isdigit() else ""
        parts.append(f"{interface.name} ({system_text(interface / 'operstate') or 'unknown'}{known_speed})")
    rdma = sorted(path.name for path in infiniband_directory.glob("*"))
    state = ", ".join(parts) + (f"; RDMA: {', '.join(rdma)}" if rdma else "")
    others = [interface.name for interface in interfaces if interface.name != "lo"]
    consequence = "runtime.network_interface chooses the interface for the ranks' traffic" if len(others) > 1 else ""
    return DoctorFinding("network", state, consequence)


def open_files_finding(soft_limit: int) -> DoctorFinding:
    """Return the limit on open files of a process."""
    if soft_limit == resource.RLIM_INFINITY:
        return DoctorFinding("open files", "unlimited")
    if soft_limit < SMALL_OPEN_FILES:
        consequence = f"enough for one host; large jobs need ulimit -n {SMALL_OPEN_FILES} or more"
        return DoctorFinding("open files", str(soft_limit), consequence, FindingLevel.WARNING)
    return DoctorFinding("open files", str(soft_limit))


def _allowed_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
