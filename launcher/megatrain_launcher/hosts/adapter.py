"""The interface between the launcher and the system that runs the hosts, and the call of that system's commands."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.exit_codes import end_text

_COMMAND_S = 30.0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about this host from the environment; a field that the environment does not give is empty or 0."""

    host: str
    address: str = ""
    """A name or an IP address."""
    launch_id: str = ""
    num_hosts: int = 0
    """The number of hosts of the launch, including spares."""
    index: int = 0
    """This host's index among the hosts of the launch."""
    labels: Mapping[str, str] = field(default_factory=dict)


class CordonError(MegatrainError):
    """The cluster did not cordon a host. The job excludes the host nevertheless."""


class HostAdapter(Protocol):
    """The adapter for one kind of cluster."""

    @property
    def name(self) -> str:
        """The adapter's name in --platform."""

    def facts(self) -> HostFacts:
        """Return the facts of this host. Raises: ConfigError when the environment is incomplete or unsuitable."""

    def cordon(self, host: str, reason: str) -> str:
        """Exclude a host from other jobs of the cluster; return a sentence on what was done, empty without a scheduler.

        Raises: CordonError.
        """


def command_problem(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command for at most 30 s, and return why it failed; empty if it succeeded."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr or done.stdout).strip() or f"{command[0]} {end_text(done.returncode)}"
