"""A peer that sends a byte from time to time, so that no single receive of the other side waits long."""

from __future__ import annotations

import socket

_PAUSE_S = 0.05


def is_ended_when_sent(connection: socket.socket, byte: bytes) -> bool:
    """Send a byte and return whether the other side has ended the connection."""
    connection.settimeout(_PAUSE_S)
    try:
        connection.sendall(byte)
        return not connection.recv(1000)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
