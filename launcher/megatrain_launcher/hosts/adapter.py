"""What the launcher needs from the system that runs the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from megatrain.contracts.errors import MegatrainError


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts about this host in the environment; empty or 0 where it has none."""

    host: str
    address: str = ""
    """A name or an IP address."""
    launch_id: str = ""
    num_hosts: int = 0
    """All hosts of the launch, including spares."""
    index: int = 0
    """This host's index among them."""
    labels: Mapping[str, str] = field(default_factory=dict)


class CordonError(MegatrainError):
    """The cluster did not cordon a host; the job itself leaves it out all the same."""


class HostAdapter(Protocol):
    """One kind of cluster."""

    @property
    def name(self) -> str:
        """Its name in --platform."""

    def facts(self) -> HostFacts:
        """Return the facts of this host. Raises: ConfigError when the environment contradicts itself."""

    def cordon(self, host: str, reason: str) -> str:
        """Keep other jobs off a host, and return a sentence on what was done; empty without a scheduler.

        Raises: CordonError.
        """
