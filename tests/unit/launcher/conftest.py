"""One etcd for all tests of the launcher that do it no harm; each has jobs of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.etcd_server import EtcdServers


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers
