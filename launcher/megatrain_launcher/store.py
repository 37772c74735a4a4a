"""The key-value store at which workers meet: an executor has one for its life, used in the rounds that list it first.

The trainer's keys begin with job and round, so that a later round never finds the addresses of an earlier one.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore

from megatrain.contracts.errors import CommunicationError

_TIMEOUT: Final = timedelta(seconds=60)


def open_store(address: str) -> tuple[TCPStore, int]:
    """Start a store that listens at this address only; return it with its port. It ends when it is deleted.

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
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
    )
    return store, port
