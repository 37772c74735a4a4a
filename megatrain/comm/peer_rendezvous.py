"""The exchange of the addresses at which ranks listen, and of the secret with which they authenticate each other."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.comm.cpu_groups import CpuGroups
from megatrain.comm.local_address import is_loopback, local_address
from megatrain.contracts.errors import CommunicationError
from megatrain.peers.link import SECRET_BYTES, PeerAddress
from megatrain.peers.server import listen


@dataclass(frozen=True, slots=True)
class PeerRendezvous:
    """This rank's listener, the addresses of all ranks in rank order, and a secret that only this rendezvous uses."""

    listener: socket.socket
    addresses: tuple[PeerAddress, ...]
    secret: bytes


def open_peer_rendezvous(
    cpu_groups: CpuGroups, rank: int, network_interface: str, store_address: str
) -> PeerRendezvous:
    """Listen, and send the address to all ranks.

    network_interface, store_address: see `local_address`.
    Communication: one agreement, one gather and one broadcast.
    Raises: CommunicationError, the same on every rank.
    """
    listener, problem = None, None
    try:
        listener = listen(local_address(network_interface, store_address))
    except CommunicationError as error:
        problem = f"rank {rank}: {error}"
    problem = cpu_groups.agree(rank, problem)
    if problem is None and listener is not None:
        own_address = [*listener.getsockname()[:2], socket.gethostname()]
        gathered = cpu_groups.gather_json(rank, own_address)
        addresses_and_secret = None if gathered is None else [gathered, secrets.token_hex(SECRET_BYTES)]
        by_rank, secret = cpu_groups.broadcast_json(addresses_and_secret)
        addresses = tuple(PeerAddress(address, port) for address, port, _ in by_rank)
        problem = unreachable_address(addresses, [machine for _, _, machine in by_rank])
        if problem is None:
            return PeerRendezvous(listener, addresses, bytes.fromhex(secret))
    if listener is not None:
        listener.close()
    raise CommunicationError(str(problem))


def unreachable_address(addresses: Sequence[PeerAddress], machines: Sequence[str]) -> str | None:
    """Return a text that names the first rank whose address other machines cannot reach; None if there is no such
    rank."""
    if len(set(machines)) == 1:
        return None
    for rank, (address, machine) in enumerate(zip(addresses, machines, strict=True)):
        if is_loopback(address.host):
            return (
                f"rank {rank}: {machine} uses the loopback address {address.host}, which other hosts cannot use; set "
                "runtime.network_interface to the interface between hosts, such as eth0"
            )
    return None
