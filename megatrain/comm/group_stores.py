"""The stores at which groups meet: the store of the job, or several if one store would be the bottleneck.

torch's store serves all ranks from one thread. In a large world some ranks serve a store each, and the job's own store
only has their addresses. A hash of the group's name selects its store. If the first rank selected it, every group along
pp, and so most requests, would use the stores of the first stage. Figures: ADR 0032.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed as dist

from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.local_address import local_address
from megatrain.comm.rendezvous import Rendezvous
from megatrain.contracts.errors import CommunicationError
from megatrain.peers.server import listen


def store_number(planned: PlannedGroup, num_stores: int) -> int:
    """Return the number of the store at which a group meets, the same for all members."""
    return zlib.crc32(planned.key.encode()) % num_stores


def serving_ranks(world_size: int, ranks_per_store: int) -> Sequence[int]:
    """Return the rank that serves each store.

    These ranks are on different hosts if each host has consecutive ranks, and at most `ranks_per_store` of them.
    """
    return range(0, world_size, ranks_per_store)


class GroupStores:
    """One rank's connections to the stores. It must live as long as the groups: this rank's own store ends with it."""

    def __init__(
        self, rendezvous: Rendezvous, *, ranks_per_store: int, timeout_s: float, network_interface: str = ""
    ) -> None:
        """Start to serve a store if this rank is a serving rank.

        Communication: a serving rank writes one key of the job's store.
        Raises: CommunicationError when this rank cannot serve its store.
        """
        process = rendezvous.process
        self._rendezvous = rendezvous
        self._timeout = timedelta(seconds=timeout_s)
        self._serving = serving_ranks(process.world_size, ranks_per_store)
        self._main = dist.PrefixStore(rendezvous.prefix, rendezvous.store)
        self._connected: dict[int, dist.Store] = {}
        if len(self._serving) > 1 and process.rank in self._serving:
            self._serve(self._serving.index(process.rank), local_address(network_interface, process.store))

    def of(self, planned: PlannedGroup) -> dist.Store:
        """Return the store at which a group meets.

        Communication: for the first group of another rank's store, two requests to the job's store and a connection.
        Raises: CommunicationError naming the rank that serves the store.
        """
        if len(self._serving) == 1:
            return self._main
        number = store_number(planned, len(self._serving))
        if number not in self._connected:
            self._connected[number] = self._connect(number)
        return self._connected[number]

    def _serve(self, number: int, host: str) -> None:
        listener = listen(host)
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._connected[number] = dist.PrefixStore(self._rendezvous.prefix, server)
        self._main.set(_key(number), f"{host}:{port}")

    def _connect(self, number: int) -> dist.Store:
        process, serving = self._rendezvous.process, self._serving[number]
        try:
            self._main.wait([_key(number)], self._timeout)
            host, _, port = self._main.get(_key(number)).decode().rpartition(":")
            store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {process.rank} could not reach the store that rank {serving} serves for groups "
                f"(runtime.ranks_per_store) within runtime.init_timeout_s={self._timeout.total_seconds():g}: {error}"
            ) from error
        return dist.PrefixStore(self._rendezvous.prefix, store)


def _key(number: int) -> str:
    return f"group-stores/{number}"
