"""Where ranks listen: at the interface that is named, at the way to the master, and never where others cannot come."""

from __future__ import annotations

import pytest

from megatrain.comm.host_groups import HostGroups
from megatrain.comm.local_address import is_loopback, local_address
from megatrain.comm.peer_link import PeerAddress
from megatrain.comm.peer_meeting import meet_peers, unreachable
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout
from tests.helpers.lone_rank import simulated_group


def test_the_address_of_an_interface() -> None:
    assert local_address("lo", "") == "127.0.0.1"
    assert local_address("lo,eth0", "192.0.2.1:29500") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(CommunicationError, match=r'runtime\.network_interface="nope0": .* has no address on it'):
        local_address("nope0", "")


@pytest.mark.parametrize("master", ["", "127.0.0.1:29500", "localhost:29500"])
def test_without_one_it_is_the_way_to_the_master(master: str) -> None:
    assert is_loopback(local_address("", master))


@pytest.mark.parametrize("master", ["no-such-host.invalid:1", "127.0.0.1:port"])
def test_a_master_to_whom_there_is_no_way_is_named(master: str) -> None:
    with pytest.raises(CommunicationError, match=f"no way from this host to the master at {master}"):
        local_address("", master)


def addresses(*hosts: str) -> list[PeerAddress]:
    return [PeerAddress(host, 4000 + number) for number, host in enumerate(hosts)]


def test_a_loopback_address_is_of_use_on_one_machine_only() -> None:
    assert unreachable(addresses("127.0.0.1", "127.0.0.1"), ["a", "a"]) is None
    assert unreachable(addresses("10.0.0.1", "fe80::1%eth0"), ["a", "b"]) is None
    for host in ("127.0.1.1", "::1"):
        problem = unreachable(addresses("10.0.0.1", host), ["a", "b"])
        assert problem == (
            f"rank 1: b knows itself as {host}, where no other host reaches it; set runtime.network_interface to the "
            "interface between hosts, such as eth0"
        )


def lone_groups() -> HostGroups:
    return HostGroups({axis: simulated_group(axis, 1, 0) for axis in Layout().grid}, Layout().grid)


def test_a_meeting_has_a_secret_of_its_own() -> None:
    first, second = (meet_peers(lone_groups(), 0, "", "") for _ in range(2))
    with first.listener, second.listener:
        assert first.addresses == (PeerAddress(*first.listener.getsockname()),)
        assert len(first.secret) == 32
        assert first.secret != second.secret


def test_a_rank_that_cannot_listen_is_named() -> None:
    with pytest.raises(CommunicationError, match=r'rank 0: runtime\.network_interface="nope0"'):
        meet_peers(lone_groups(), 0, "nope0", "")


def test_addresses_are_written_as_usual() -> None:
    assert [str(one) for one in addresses("10.0.0.1", "fe80::1")] == ["10.0.0.1:4000", "[fe80::1]:4001"]
