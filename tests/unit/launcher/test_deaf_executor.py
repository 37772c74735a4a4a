"""An executor that cannot hear its orders: it hears again by itself, and until then it is not fit and says so."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import encode
from megatrain.contracts.rounds import Halt, JobEnd, Round, RoundHost
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain_launcher.executor.orders import OrderBook
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import wait_until

KEYS = JobKeys("deaf")
LONG_LENGTH = [b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"]
FOLLOWED = {name: KEYS.directory(name) for name in ("rounds", "halts", "commands")}


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


def is_watch_of(directory: str, request: bytes) -> bool:
    return b"/v3/watch" in request and base64.b64encode(directory.encode()) in request


def test_one_malformed_answer_deafens_nobody(etcd: EtcdServers) -> None:
    """Each of the three watches that carry orders is answered once with a length of 5,000 digits."""
    told: set[str] = set()

    def spoils(request: bytes) -> bool:
        found = {name for name, directory in FOLLOWED.items() if is_watch_of(directory, request)} - told
        told.update(found)
        return bool(found)

    with (
        EtcdClient(EtcdSettings.of(etcd.urls)) as driver,
        EtcdProxy(etcd.members[0].client_port) as proxy,
        EtcdClient(EtcdSettings.of(proxy.url)) as client,
        OrderBook(KEYS, "a", "1") as book,
    ):
        proxy.garbage, proxy.spoils, proxy.conduct = LONG_LENGTH, spoils, Conduct.GARBAGE
        book.follow(client)
        wait_until(lambda: told == set(FOLLOWED), "each watch to be answered with garbage", 10.0)
        part = RoundHost("a", "1", "127.0.0.1", 0, 1)
        driver.put(KEYS.round(1), encode(Round(1, 1, (part,), "127.0.0.1", 1, "a test", "d", 0.0)))
        driver.put(KEYS.halt(1), encode(Halt(1, "a test", False, 0.0)))
        driver.put(KEYS.end, encode(JobEnd(0, "a test", 0.0)))

        wait_until(lambda: book.view().named_in == 1, "the round to be heard", 10.0)
        wait_until(lambda: book.view().newest_halt == 1, "the halt to be heard", 10.0)
        wait_until(lambda: book.view().end is not None, "the end to be heard", 10.0)
        wait_until(lambda: book.trouble == "", "the trouble to be over", 10.0)
