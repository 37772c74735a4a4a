"""What the rest of the launcher needs of whatever runs the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from megatrain.contracts.errors import MegatrainError


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the environment tells of this host; empty or 0 where it does not."""

    host: str
    address: str = ""
    """A name or an IP address."""
    launch_id: str = ""
    num_hosts: int = 0
    """All hosts of the launch, spares too."""
    index: int = 0
    """Of this host among them."""
    labels: Mapping[str, str] = field(default_factory=dict)


class CordonError(MegatrainError):
    """The cluster did not take a host out of use; the job itself leaves it out all the same."""


class HostAdapter(Protocol):
    """One kind of cluster."""

    @property
    def name(self) -> str:
        """The word for it in --platform."""

    def facts(self) -> HostFacts:
        """Return who this host is. Raises: ConfigError when the environment contradicts itself."""

    def cordon(self, host: str, reason: str) -> str:
        """Keep other jobs off a host, and return what was done in words; empty without a scheduler.

        Raises: CordonError.
        """
