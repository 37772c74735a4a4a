"""How ranks come to know where their peers listen, and the secret by which they know each other."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.comm.host_groups import HostGroups
from megatrain.comm.local_address import is_loopback, local_address
from megatrain.comm.peer_link import SECRET_BYTES, PeerAddress, listen
from megatrain.contracts.errors import CommunicationError


@dataclass(frozen=True, slots=True)
class Meeting:
    """This rank's listener, everybody's address by rank, and a secret of this meeting alone."""

    listener: socket.socket
    addresses: tuple[PeerAddress, ...]
    secret: bytes


def meet_peers(host: HostGroups, rank: int, network_interface: str, master: str) -> Meeting:
    """Listen, and tell all ranks where.

    network_interface, master: as `local_address` takes them.
    Communication: one agreement, one gather and one broadcast.
    Raises: CommunicationError, the same on every rank.
    """
    listener, problem = None, None
    try:
        listener = listen(local_address(network_interface, master))
    except CommunicationError as error:
        problem = f"rank {rank}: {error}"
    problem = host.agree(rank, problem)
    if problem is None and listener is not None:
        own = [*listener.getsockname()[:2], socket.gethostname()]
        gathered = host.gather_json(rank, own)
        told = None if gathered is None else [gathered, secrets.token_hex(SECRET_BYTES)]
        by_rank, secret = host.broadcast_json(told)
        addresses = tuple(PeerAddress(where, port) for where, port, _ in by_rank)
        problem = unreachable(addresses, [machine for _, _, machine in by_rank])
        if problem is None:
            return Meeting(listener, addresses, bytes.fromhex(secret))
    if listener is not None:
        listener.close()
    raise CommunicationError(str(problem))


def unreachable(addresses: Sequence[PeerAddress], machines: Sequence[str]) -> str | None:
    """Return which rank listens where other machines cannot come; None when there is none."""
    if len(set(machines)) == 1:
        return None
    for rank, (address, machine) in enumerate(zip(addresses, machines, strict=True)):
        if is_loopback(address.host):
            return (
                f"rank {rank}: {machine} knows itself as {address.host}, where no other host reaches it; set "
                "runtime.network_interface to the interface between hosts, such as eth0"
            )
    return None
