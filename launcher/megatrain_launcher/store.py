"""The key-value store through which workers find each other. Each executor has one; a round uses that of its first
host.

The executor opens the listening socket, and a separate process (`megatrain_launcher.standby.store_process`) serves it,
so that the executor needs no torch. The trainer's keys begin with job and round, so that a later round never finds the
addresses of an earlier one.
"""

from __future__ import annotations

import socket

from megatrain.contracts.errors import CommunicationError


def listen_for_store(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address only. Connections wait until the store accepts them.

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
