"""Slurm: one `srun` starts an executor on each host of the allocation; SLURM_* variables identify the hosts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from megatrain.contracts.errors import ConfigError
from megatrain_launcher.hosts.adapter import CordonError, HostFacts, command_problem
from megatrain_launcher.hosts.local import host_name


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process; false in a batch script or a shell of salloc."""
    return "SLURM_JOB_ID" in environment and "SLURM_PROCID" in environment and _step(environment) not in _NO_TASK


_NO_TASK = ("batch", "extern", "interactive", "4294967291", "4294967292", "4294967294")


def _step(environment: Mapping[str, str]) -> str:
    """Return the step's id. Batch scripts and salloc's shells have a name, or a number near 2^32."""
    return environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "batch"))


class SlurmPlatform:
    """Implements HostAdapter under `srun`."""

    name = "slurm"

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def facts(self) -> HostFacts:
        """Return the host's facts. Raises: ConfigError when a host has more than one task, or a variable is missing."""
        tasks = self._environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")
        if any(task.partition("(")[0] != "1" for task in tasks):
            rule = "one executor per host starts all of its workers"
            problem = f"SLURM_STEP_TASKS_PER_NODE={','.join(tasks)}: {rule}"
            raise ConfigError([f"{problem}; use srun --ntasks-per-node=1 with --nproc-per-node"])
        host = self._environment.get("SLURMD_NODENAME") or host_name()
        restarts = self._environment.get("SLURM_RESTART_COUNT", "0")
        return HostFacts(
            host=host,
            address=host,
            launch_id=f"slurm-{self._environment.get('SLURM_JOB_ID', '')}.{restarts}.{_step(self._environment)}",
            num_hosts=self._number("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
            index=self._number("SLURM_NODEID"),
            labels=self._labels(),
        )

    def cordon(self, host: str, reason: str) -> str:
        """Drain a node, which requires the rights of a Slurm operator. Raises: CordonError."""
        program = shutil.which("scontrol", path=self._environment.get("PATH"))
        if program is None:
            raise CordonError(f"Slurm did not drain {host}: no scontrol on PATH; ask an operator to do it")
        node, cause = f"NodeName={host}", f"Reason=megatrain: {reason}"[:200]
        problem = command_problem([program, "update", node, "State=DRAIN", cause], self._environment)
        if problem:
            raise CordonError(f"Slurm did not drain {host}: {problem}; ask an operator to do it")
        return f"Slurm drains {host}"

    def _number(self, *names: str) -> int:
        for name in names:
            text = self._environment.get(name, "")
            if text.isascii() and text.isdigit() and len(text) < 8:
                return int(text)
        raise ConfigError([f"{names[0]} is not set, or is not a number; start with srun, or give --platform=local"])

    def _labels(self) -> dict[str, str]:
        """Return the label `switch` from SLURM_TOPOLOGY_ADDR (s0.s3.node7): the path to the node's switch (s0.s3)."""
        names = self._environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
        pattern = self._environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node").split(".")
        if len(names) < 2 or len(names) != len(pattern) or pattern[-2] != "switch":
            return {}
        # the path, not only the last switch, so that hosts under one higher switch sort together too
        return {"switch": ".".join(names[:-1])}
