"""Network addresses: whether only this machine can reach one, and web addresses to send requests to.

A web address is parsed strictly, and shown without the parts that may be secret.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

_MAX_CHARACTERS = 2048
_PORTS = {"http": 80, "https": 443}


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address. Of all names, only localhost counts as such an address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class WebAddress:
    """The target of a request. Path and query may be secret, as in an incoming webhook, so no text shows them."""

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)
    """Path and query."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "https://host[:port][/path][?query]". Raises: ValueError with the broken rule, never with the text."""
        if not re.fullmatch(r"[!-~]+", text) or len(text) > _MAX_CHARACTERS:
            raise ValueError(f"must be ASCII without spaces, of at most {_MAX_CHARACTERS} characters")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError("has an invalid host or port") from error
        if parts.scheme not in _PORTS:
            raise ValueError("must begin with https:// or http://")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not hold a user or a password: every reader of the address would see them")
        if parts.fragment or text.endswith("#"):
            raise ValueError("must not have a part after #, which is never sent")
        host = parts.hostname or ""
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", host) or port == 0:
            raise ValueError("has an invalid host or port")
        query = f"?{parts.query}" if parts.query else ""
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], f"{parts.path or '/'}{query}")

    @property
    def is_private(self) -> bool:
        """Whether a request to this address is encrypted, or never leaves this machine."""
        return self.scheme == "https" or is_loopback(self.host)

    @property
    def authority(self) -> str:
        """The server's name in a request: the host, and the port unless it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"
