"""The address on which ranks listen: that of the named interface, else of the route to the store, and one that peers
can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.comm.local_address import is_loopback, local_address
from megatrain.comm.peer_rendezvous import open_peer_rendezvous, unreachable_address
from megatrain.contracts.errors import CommunicationError
from megatrain.peers.link import PeerAddress
from tests.helpers.single_rank import single_rank_groups


def test_address_is_that_of_the_interface() -> None:
    assert local_address("lo", "") == "127.0.0.1"
    assert local_address("lo,eth0", "192.0.2.1:29500") == "127.0.0.1"


def test_interface_without_ipv4_has_its_global_ipv6_address(tmp_path: Path) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "20010db8000000000000000000000001 02 40 00 80    other0\n"
        "fe800000000000000000000000000007 02 40 20 80     fake0\n"
        "20010db8000000000000000000000007 02 40 00 80     fake0\n"
    )
    assert local_address("fake0", "", listed) == "2001:db8::7"


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(
        CommunicationError, match=r'runtime\.network_interface="nope0": .* has no address on this interface'
    ):
        local_address("nope0", "")


@pytest.mark.parametrize("store_address", ["", "127.0.0.1:29500", "localhost:29500"])
def test_default_address_is_on_the_route_to_the_store(store_address: str) -> None:
    assert is_loopback(local_address("", store_address))


@pytest.mark.parametrize("store_address", ["no-such-host.invalid:1", "127.0.0.1:port"])
def test_store_without_a_route_is_named(store_address: str) -> None:
    with pytest.raises(CommunicationError, match=f"this host has no network path to the store at {store_address}"):
        local_address("", store_address)


def addresses(*hosts: str) -> list[PeerAddress]:
    return [PeerAddress(host, 4000 + number) for number, host in enumerate(hosts)]


def test_loopback_address_is_refused_between_hosts() -> None:
    assert unreachable_address(addresses("127.0.0.1", "127.0.0.1"), ["a", "a"]) is None
    assert unreachable_address(addresses("10.0.0.1", "fe80::1%eth0"), ["a", "b"]) is None
    for host in ("127.0.1.1", "::1"):
        problem = unreachable_address(addresses("10.0.0.1", host), ["a", "b"])
        assert problem == (
            f"rank 1: b uses the loopback address {host}, which other hosts cannot use; set runtime.network_interface "
            "to the interface between hosts, such as eth0"
        )


def test_a_peer_rendezvous_has_a_secret_of_its_own() -> None:
    first, second = (open_peer_rendezvous(single_rank_groups(), 0, "", "") for _ in range(2))
    with first.listener, second.listener:
        assert first.addresses == (PeerAddress(*first.listener.getsockname()),)
        assert len(first.secret) == 32
        assert first.secret != second.secret


def test_a_rank_that_cannot_listen_is_named() -> None:
    with pytest.raises(CommunicationError, match=r'rank 0: runtime\.network_interface="nope0"'):
        open_peer_rendezvous(single_rank_groups(), 0, "nope0", "")


def test_addresses_are_formatted_with_brackets_for_ipv6() -> None:
    assert [str(address) for address in addresses("10.0.0.1", "fe80::1")] == ["10.0.0.1:4000", "[fe80::1]:4001"]
