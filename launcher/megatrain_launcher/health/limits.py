"""Checks the process limits: open files, and locked memory if there is an RDMA device."""

from __future__ import annotations

import resource

from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("open-files", "locked-memory")
DEADLINE_S = 5.0
TOO_FEW_FILES = 256
"""Below this limit, a host is unfit: torch's libraries, the logs and torch's store use about a hundred files."""
FEW_FILES = 4096
"""Below this limit, a check warns: a rank opens a socket to each peer of each group, plus files and libraries."""
SMALL_LOCKED_BYTES = 1 << 30


def check_limits(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Read the limits of this process, which its workers inherit."""
    del history
    has_rdma = any((context.places.sys / "class/infiniband").glob("*"))
    return (
        judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        judge_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_rdma),
    )


def judge_open_files(soft_limit: int) -> HealthFinding:
    """Judge the limit on open files."""
    if soft_limit == resource.RLIM_INFINITY:
        return passed(NAMES[0], "unlimited")
    if soft_limit < TOO_FEW_FILES:
        return failed(NAMES[0], f"{soft_limit}; a worker needs at least {TOO_FEW_FILES}: ulimit -n {FEW_FILES}")
    if soft_limit < FEW_FILES:
        return warning(NAMES[0], f"{soft_limit}; enough for a few hosts, but large jobs need ulimit -n {FEW_FILES}")
    return passed(NAMES[0], f"{soft_limit}")


def judge_locked_memory(soft_limit: int, has_rdma: bool) -> HealthFinding:
    """Judge the limit on locked memory, which RDMA needs for its buffers."""
    if not has_rdma:
        return skipped(NAMES[1], "no RDMA device")
    if soft_limit == resource.RLIM_INFINITY:
        return passed(NAMES[1], "unlimited")
    state = f"{soft_limit >> 20} MiB"
    if soft_limit < SMALL_LOCKED_BYTES:
        return failed(NAMES[1], f"{state}: RDMA cannot register its buffers; ulimit -l unlimited")
    return warning(NAMES[1], f"{state}; RDMA may run out of it: ulimit -l unlimited")
