"""Addresses as people write them: which are this machine's alone."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Say whether only this machine reaches an address. A name other than localhost may mean anything."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
