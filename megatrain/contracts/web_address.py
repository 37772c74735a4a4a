"""An address of the web that something is sent to: read strictly, and shown without what may be a secret in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from megatrain.contracts.addresses import is_loopback

_MOST_CHARACTERS = 2048
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where a request goes. Path and query may be secret, as those of an incoming webhook: no text shows them."""

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)
    """Path and query."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "https://host[:port][/path][?query]". Raises: ValueError with the broken rule, never with the text."""
        if not re.fullmatch(r"[!-~]+", text) or len(text) > _MOST_CHARACTERS:
            raise ValueError(f"must be ASCII without spaces, of at most {_MOST_CHARACTERS} characters")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError("has a host or port that is none") from error
        if parts.scheme not in _PORTS:
            raise ValueError("must begin with https:// or http://")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not hold a user or a password: everybody who sees an address would see them")
        if parts.fragment or text.endswith("#"):
            raise ValueError("must not have a part after #, which is never sent")
        host = parts.hostname or ""
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", host) or port == 0:
            raise ValueError("has a host or port that is none")
        query = f"?{parts.query}" if parts.query else ""
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], f"{parts.path or '/'}{query}")

    @property
    def is_private(self) -> bool:
        """Whether nothing on the way can read what is sent: it is encrypted, or never leaves this machine."""
        return self.scheme == "https" or is_loopback(self.host)

    @property
    def authority(self) -> str:
        """What a request calls the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"
