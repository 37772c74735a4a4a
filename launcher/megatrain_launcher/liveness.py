"""Checks whether the executor of a host is alive, and whether the driver's orders reach it.

Each executor listens on a port, sends its session to each connection, and closes the connection. A refused connection,
or another session, proves that the executor is gone, but only to a process that has reached the port before; otherwise
a firewall may have refused, or the address may belong to another machine. A missing answer proves neither.

A host that the driver's orders do not reach must not join a new round, because it would not see when to start or stop
workers.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from enum import StrEnum

from megatrain_job.coordination.watch import WatchLimits

_ANSWER_S = 1.0
_AGAIN_S = 0.05
_LAST_PORT = 65535
_MAX_ANSWER_BYTES = 256

_PROOFS_S = 2 * WatchLimits().silence_s
"""An idle watch is confirmed to work within half of this time; after an outage of etcd, within this time."""


class Liveness(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class LivenessPort:
    """Listens on a free port of this host until `close`."""

    def __init__(self, session: str, address: str = "") -> None:
        self.session = session
        """Sent to each connection; it may be replaced at any time."""
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close alone does not
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(_AGAIN_S):
                    return
                continue  # the caller has disconnected, or this process is out of descriptors for the moment
            with connection, suppress(OSError):
                connection.settimeout(_ANSWER_S)
                connection.sendall(self.session.encode() + b"\n")


def ask(address: str, port: int, session: str, *, timeout_s: float = _ANSWER_S) -> tuple[Liveness, str]:
    """Return whether the executor with this session answers at a port, and the evidence as a sentence."""
    endpoint = f"{address}:{port}"
    if not 0 < port <= _LAST_PORT:
        return Liveness.UNKNOWN, f"{endpoint} is not an address"
    deadline = time.monotonic() + timeout_s
    received = b""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            while len(received) < _MAX_ANSWER_BYTES:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = connection.recv(_MAX_ANSWER_BYTES)
                if not part:
                    break
                received += part
    except ConnectionRefusedError:
        return Liveness.DEAD, f"{endpoint} refuses connections: no executor is there"
    except (OSError, ValueError) as error:  # an address may be an invalid name
        return Liveness.UNKNOWN, f"{endpoint} does not answer ({error})"
    found = received.decode(errors="replace").strip()
    if found == session:
        return Liveness.ALIVE, f"{endpoint} answers: its executor lives"
    if not found:
        return Liveness.UNKNOWN, f"{endpoint} accepted the connection but sent nothing"
    return Liveness.DEAD, f"{endpoint} now belongs to another executor"


class LivenessReader:
    """Probes liveness ports of other machines.

    Reports an executor dead only if it was reached before. Thread-safe.
    """

    def __init__(self) -> None:
        self._reached: set[tuple[str, int]] = set()

    def ask(self, address: str, port: int, session: str) -> tuple[Liveness, str]:
        """Same as the function `ask`, but UNKNOWN instead of DEAD for a port that never answered this process."""
        liveness, detail = ask(address, port, session)
        if liveness is Liveness.ALIVE:
            self._reached.add((address, port))
        elif liveness is Liveness.DEAD and (address, port) not in self._reached:
            return Liveness.UNKNOWN, f"{detail}, or a firewall is in between: it has never answered here"
        return liveness, detail


def orders_lost_after_s(lease_ttl_s: float) -> float:
    """Return the seconds without orders after which a host is treated as if it had lost its lease."""
    return max(lease_ttl_s, _PROOFS_S)


def orders_lost_within_s(lease_ttl_s: float) -> float:
    """Return the longest time, in seconds, until a host that no halt reaches is treated as one that lost its lease.

    A watch stream that delivers nothing, while its etcd member answers other calls, appears to work until it is
    reopened.
    """
    return orders_lost_after_s(lease_ttl_s) + WatchLimits().renew_s


def unfit_after_s(lease_ttl_s: float) -> float:
    """Return the seconds without orders after which a host with a lease reports that it is not fit.

    An outage of etcd cannot be the reason: after an outage of this length the host has no lease either.
    """
    return orders_lost_after_s(lease_ttl_s) + _PROOFS_S


class OrderDelivery:
    """Checks at each poll whether orders arrive. All times are in seconds of one monotonic clock."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._held_since: float | None = None
        self._problem = ""
        self._reason = ""

    def poll(self, now: float, unconfirmed_s: float, problem: str, *, is_lease_held: bool) -> str:
        """Return why this host is not fit, empty if it is. The reason names the first problem that is known, and stays
        the same until the host receives orders again.

        Only the time during which the host has its lease counts: while etcd is unavailable no host receives anything,
        and afterwards the watch may recover a moment later than the lease.
        """
        if not is_lease_held:
            self._held_since = None
            return self._reason
        if self._held_since is None:
            self._held_since = now
        has_lost_orders = min(unconfirmed_s, now - self._held_since) > self._bound_s
        if has_lost_orders:
            self._problem = self._problem or problem
            missing = self._problem or f"no sign of them for {self._bound_s:g} s"
            self._reason = f"its orders do not arrive: {missing}"
        elif unconfirmed_s <= self._bound_s:
            self._problem = self._reason = ""
        return self._reason
