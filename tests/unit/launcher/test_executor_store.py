"""The store that an executor keeps: it listens at the given address, and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatrain.contracts.errors import CommunicationError
from megatrain_launcher.store import open_store
from tests.helpers.waiting import DEADLINE_S


def test_clients_meet_at_the_store() -> None:
    store, port = open_store("127.0.0.1")
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    client.set("a", "1")
    assert store.get("a") == b"1"


def test_two_stores_have_two_ports() -> None:
    (first, first_port), (second, second_port) = open_store("127.0.0.1"), open_store("127.0.0.1")
    assert first_port != second_port
    first.set("a", "1")
    assert not second.check(["a"])


def test_store_listens_at_its_address_only() -> None:
    store, port = open_store("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=DEADLINE_S)
    del store


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(CommunicationError, match=r"192\.0\.2\.1.*--local-addr"):
        open_store("192.0.2.1")
    with pytest.raises(CommunicationError, match="no-such-host"):
        open_store("no-such-host.invalid")
