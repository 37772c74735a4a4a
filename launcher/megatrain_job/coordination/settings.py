"""The address of etcd, and authentication: endpoints, TLS files, user and password, time limits.

A password is sent only through a unix socket, over TLS or over loopback. No text from this module contains it.
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
from megatrain.contracts.network_address import is_loopback

DEFAULT_PORT = 2379
_UNIX = "unix:"
_MAX_SOCKET_BYTES = 107
"""The kernel's limit for a socket's path, without the terminating zero."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member of the cluster, as its clients reach it: by host and port, or by the path of a unix socket."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, text: str, default_scheme: str = "http") -> Self:
        """Read "host", "host:port", "[v6]:port", any of them after "http://" or "https://", or "unix:/PATH".

        Raises: ConfigError for any other text.
        """
        if text.strip().startswith(_UNIX):
            return cls.of_socket(Path(text.strip().removeprefix(_UNIX)))
        whole = text.strip() if "://" in text else f"{default_scheme}://{text.strip()}"
        try:
            parts = urlsplit(whole)
            port = DEFAULT_PORT if parts.port is None else parts.port
        except ValueError as error:
            raise ConfigError([f"etcd endpoint {text!r}: {error}; write host:port or https://host:port"]) from error
        if parts.username is not None or parts.password is not None:
            raise ConfigError([f"etcd endpoint of host {parts.hostname!r}: give user and password separately"])
        host = parts.hostname or ""
        is_plain = parts.path in ("", "/") and not parts.query and not parts.fragment
        is_host = re.fullmatch(r"[A-Za-z0-9._:%-]+", host) is not None
        if parts.scheme not in ("http", "https") or not is_host or not is_plain or port == 0:
            raise ConfigError([f"etcd endpoint {text!r}: not host:port, https://host:port or unix:/PATH"])
        return cls(parts.scheme, host, port)

    @classmethod
    def of_socket(cls, path: Path) -> Self:
        """Return the endpoint of a unix socket.

        Raises: ConfigError for a relative path, or one for which `fits_socket` is false.
        """
        text = str(path)
        if not path.is_absolute() or not fits_socket(text):
            rule = f"an absolute path of at most {_MAX_SOCKET_BYTES} ASCII characters without commas and spaces"
            raise ConfigError([f"etcd endpoint {_UNIX + text!r}: expected {rule}"])
        return cls("unix", "localhost", 0, text)

    @property
    def is_local(self) -> bool:
        """Whether the host is a loopback address, so that only this machine can listen there."""
        return is_loopback(self.host)

    @property
    def authority(self) -> str:
        """The server's name in requests."""
        if self.path:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return _UNIX + self.path if self.path else f"{self.scheme}://{self.authority}"


def fits_socket(path: str) -> bool:
    """Return whether a unix socket can have this path, and a comma-separated list of endpoints can contain it."""
    return re.fullmatch(r"[!-+\--~]+", path) is not None and len(path) <= _MAX_SOCKET_BYTES


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of etcd. `file`: where the password was read, for processes that must read it too."""

    user: str
    password: str = field(repr=False)
    file: Path | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. Without `ca` the system's authorities are trusted; `certificate` and `key` are this client's own.

    etcd's gateway does not take the user from a certificate's name: the client certificate permits the connection,
    and name and password identify the user.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of connections. Raises: ConfigError naming the unusable file."""
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
    # otherwise OpenSSL would ask for a passphrase on the terminal
    raise ValueError("the key is encrypted; give one that is not")


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """The settings of a client. `attempt_s` limits one try at one endpoint, `call_s` a call with all its tries."""

    endpoints: tuple[Endpoint, ...]
    credentials: Credentials | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)
    attempt_s: float = 3.0
    call_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError(["etcd: no endpoint is given"])
        open_to_all = [endpoint for endpoint in self.endpoints if endpoint.scheme == "http" and not endpoint.is_local]
        if self.credentials is not None and open_to_all:
            problem = f"etcd endpoint {open_to_all[0]}: a password sent over plain http could be read on the network"
            raise ConfigError([f"{problem}; let etcd serve TLS and write https://, or give no user"])

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
        """Read endpoints from a list or from one text with commas. With TLS files, https is the default scheme.

        Raises: ConfigError when one is malformed, none is given, or a password would go to another host in plain http.
        """
        texts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
        scheme = "http" if tls is None else "https"
        parsed = tuple(dict.fromkeys(Endpoint.parse(text, scheme) for text in texts if text.strip()))
        return cls(parsed, credentials, tls or TlsFiles(), attempt_s, call_s)
