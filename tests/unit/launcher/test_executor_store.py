"""The store of a host: it listens only at the given address, and answers while the standby server runs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatrain.contracts.errors import CommunicationError
from megatrain.programs.processes import process_stat
from megatrain_launcher.standby.client import StandbyClient
from megatrain_launcher.store import listen_for_store
from tests.helpers.processes import descendants, is_running
from tests.helpers.standby_workers import STAYS, Programs, programs
from tests.helpers.waiting import DEADLINE_S, wait_until


def connect(listener: socket.socket) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with listen_for_store("127.0.0.1") as listening:
        yield listening


@pytest.fixture(scope="module")
def shared(listener: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """A server with a store: each store loads torch, so tests that do not end it share one."""
    with programs(tmp_path_factory.mktemp("programs"), store=listener) as made:
        yield made


@pytest.mark.slow
def test_stop_signals_leave_the_store_to_the_executor(listener: socket.socket, shared: Programs) -> None:
    first, second = connect(listener), connect(listener)
    first.set("a", "1")
    assert second.get("a") == b"1"
    server = shared.client.pid or 0
    (store,) = descendants(server)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(store, number)
    connect(listener).set("b", "1")
    assert descendants(server) == [store]


def test_worker_beside_a_store_holds_only_its_own_descriptors(shared: Programs) -> None:
    sleeper, sleeper_output = shared.start(STAYS)
    text, _ = shared.run(
        """
        import os
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            try:
                print(name, os.readlink("/proc/self/fd/" + name))
            except FileNotFoundError:
                pass  # of the listing itself
        """
    )
    shared.client.kill([sleeper])
    os.close(sleeper_output)
    (stdin, stdout, stderr) = text.splitlines()
    assert stdin == "0 /dev/null"
    assert stdout.startswith("1 pipe:")
    assert stderr == stdout.replace("1 ", "2 ", 1)


@pytest.mark.slow
def test_store_without_keys_follows_one_that_was_killed() -> None:
    with listen_for_store("127.0.0.1") as listener:
        with StandbyClient(preload=(), store=listener) as client:
            connect(listener).set("a", "1")
            server = client.pid or 0
            (store,) = descendants(server)
            os.kill(store, signal.SIGKILL)
            wait_until(lambda: client.pid not in (None, server), "another standby server")
            assert not connect(listener).check(["a"])
            assert process_stat(server) is None
            (store,) = descendants(client.pid or 0)
        wait_until(lambda: not is_running(store), "the end of the store's process with its executor")


def test_store_listens_at_its_address_only(listener: socket.socket) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.getsockname()[1]), timeout=DEADLINE_S)


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(CommunicationError, match=r"192\.0\.2\.1.*--local-addr"):
        listen_for_store("192.0.2.1")
    with pytest.raises(CommunicationError, match="no-such-host"):
        listen_for_store("no-such-host.invalid")
