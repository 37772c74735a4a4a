"""The key-value store at which workers meet: an executor has one for its life, used in the rounds that list it first.

The executor listens; a process beside the workers answers (`megatrain_launcher.standby.store_process`), so that the
executor needs no torch. The trainer's keys begin with job and round, so that a later round never finds the addresses of
an earlier one.
"""

from __future__ import annotations

import socket

from megatrain.contracts.errors import CommunicationError


def listen_for_store(address: str) -> socket.socket:
    """Return a socket that listens at this address only, on a free port. Connections wait there for the store.

    Raises: CommunicationError when the address is not this host's.
    """
    try:
        family, kind, number, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.bind(socket_address)
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise CommunicationError(
            f"no store can listen at {address} ({error.strerror or error}); give --local-addr an address of this host"
        ) from error
    return listener
