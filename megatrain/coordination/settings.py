"""Where etcd is and how to enter: endpoints, TLS files, user and password, time limits.

No text that this module makes ever holds the password.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from megatrain.contracts.errors import ConfigError

DEFAULT_PORT = 2379


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member of the cluster, as its clients reach it."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_scheme: str = "http") -> Self:
        """Read "host", "host:port", "[v6]:port" or any of them after "http://" or "https://".

        Raises: ConfigError when it is something else.
        """
        whole = text.strip() if "://" in text else f"{default_scheme}://{text.strip()}"
        try:
            parts = urlsplit(whole)
            port = DEFAULT_PORT if parts.port is None else parts.port
        except ValueError as error:
            raise ConfigError([f"etcd endpoint {text!r}: {error}; write host:port or https://host:port"]) from error
        if parts.username is not None or parts.password is not None:
            raise ConfigError([f"etcd endpoint of host {parts.hostname!r}: give user and password apart from it"])
        host = parts.hostname or ""
        is_plain = parts.path in ("", "/") and not parts.query and not parts.fragment
        is_host = re.fullmatch(r"[A-Za-z0-9._:%-]+", host) is not None
        if parts.scheme not in ("http", "https") or not is_host or not is_plain or port == 0:
            raise ConfigError([f"etcd endpoint {text!r}: not host:port or https://host:port"])
        return cls(parts.scheme, host, port)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of etcd."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. Without `ca` the system's authorities are trusted; `certificate` and `key` are this client's own.

    etcd's gateway does not take a certificate's name for a user: a client certificate opens the connection, user and
    password say who it is.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with. Raises: ConfigError naming the file that is of no use."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(["etcd TLS: a client certificate and its key go together; only one of them is given"])
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError([f"etcd TLS: cannot use {self.ca} as authority: {error}"]) from error
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigError([f"etcd TLS: cannot use {self.certificate} with key {self.key}: {error}"]) from error
        return context


def _no_passphrase() -> str:
    # otherwise OpenSSL asks the terminal, where nobody is
    raise ValueError("the key is encrypted; give one that is not")


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Everything a client needs. `attempt_s` limits one try at one endpoint, `call_s` a call with all its tries."""

    endpoints: tuple[Endpoint, ...]
    credentials: Credentials | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)
    attempt_s: float = 3.0
    call_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError(["etcd: no endpoint is given"])

    @classmethod
    def of(
        cls,
        endpoints: str | Sequence[str],
        *,
        credentials: Credentials | None = None,
        tls: TlsFiles | None = None,
        attempt_s: float = 3.0,
        call_s: float = 10.0,
    ) -> Self:
        """Read endpoints from a list or from one text with commas. With TLS files, https is meant where none is said.

        Raises: ConfigError when one is malformed.
        """
        texts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
        scheme = "http" if tls is None else "https"
        parsed = tuple(dict.fromkeys(Endpoint.parse(text, scheme) for text in texts if text.strip()))
        return cls(parsed, credentials, tls or TlsFiles(), attempt_s, call_s)
