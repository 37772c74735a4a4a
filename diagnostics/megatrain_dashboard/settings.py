"""The settings of a dashboard: the checked section [dashboard], with the contents of the files that it names.

Everything is read once, when the program starts. If there are mistakes, all of them are reported together and nothing
is served.
"""

from __future__ import annotations

import functools
import hashlib
import socket
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network

from megatrain.config.checks.dashboard import comma_list, dashboard_problems
from megatrain.config.dashboard import DashboardConfig
from megatrain.config.options import options_of
from megatrain.config.toml_text import setting
from megatrain.contracts.errors import ConfigError
from megatrain_diagnostics.metrics.server import read_token

_MIN_TOKEN_CHARACTERS = 16
"""A token of this length cannot be guessed with the few attempts per minute that an address has."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one dashboard, so that no client can prevent responses to others."""

    max_body_bytes: int = 16 * 1024
    """The largest request of the page is a reason of 500 characters."""
    max_headers: int = 64
    max_head_bytes: int = 16 * 1024
    """The limit on the request line and all headers; browsers send about 1 kB, proxies a few kB more."""
    head_s: float = 10.0
    """The limit from the first byte of a request, or from its connection, to the end of its headers."""
    body_s: float = 10.0
    stall_s: float = 10.0
    """A client that takes this long for the next `stall_bytes` of a response is dropped."""
    stall_bytes: int = 64 * 1024
    max_unread_bytes: int = 256 * 2**20
    """The limit on the unread bytes of all responses. Beyond it, the client that has been paused longest is dropped."""
    max_connections: int = 512
    max_streams: int = 100
    max_streams_per_address: int = 60
    """Less than max_streams, so that one machine with many open pages leaves streams for others."""
    stream_s: float = 3600.0
    """A stream ends after this time, and the page opens another one, so that rights are checked again."""
    heartbeat_s: float = 15.0
    log_search_s: float = 2.0
    """A search of the log lines ends after this time, with the newest lines searched."""
    log_causes_s: float = 10.0
    """The limit on reading the ends of all logs of a round, which are searched for the causes of its failure."""
    max_wrong_tokens: int = 10
    """Wrong tokens in a minute from one address. After them even the right token must wait, unless many callers share
    the address."""


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """All settings of the server. Tokens are empty where there are none."""

    address: str = "127.0.0.1"
    port: int = 8777
    is_port_asked: bool = False
    """Whether the port was requested, so that no other port may be used instead."""
    enable_actions: bool = False
    viewer_token: str = field(default="", repr=False)
    operator_token: str = field(default="", repr=False)
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    user_header: str = ""
    role_header: str = ""
    host_names: frozenset[str] = frozenset()
    """Names in addition to those that `allowed_names` adds."""
    base_path: str = ""
    perfetto_url: str = ""
    session_s: float = 12 * 3600.0
    """The time for which a browser stays logged in: a working day."""
    limits: Limits = Limits()

    @property
    def is_open(self) -> bool:
        """Whether every caller that reaches the page may read it. `settings_of` allows that only on loopback."""
        return not self.viewer_token and not self.operator_token and not self.trusted_proxies

    @property
    def is_wildcard(self) -> bool:
        """Whether the server listens at all addresses of the machine."""
        return self.address in _WILDCARDS

    @property
    def allowed_names(self) -> frozenset[str]:
        """Names and addresses, in lower case, under which a browser may request the page."""
        own = () if self.is_wildcard else (self.address,)
        machine = (socket.gethostname(), socket.getfqdn()) if self.is_wildcard else ()
        return frozenset(name.lower() for name in (*_LOOPBACK_NAMES, *own, *machine)) | self.host_names

    @property
    def cookie_name(self) -> str:
        """The name of the cookie. All ports of a host name share cookies, so each dashboard has its own cookie name."""
        return _cookie_name("\n".join((self.viewer_token, self.operator_token, self.base_path)))


@functools.cache
def _cookie_name(secret: str) -> str:
    """Return the name of the cookie of a dashboard with these tokens.

    Any caller can read the name in the response to a logout, and viewers have one of the tokens. scrypt makes each
    guess of the other token take a tenth of a second on the guesser's own machine.
    """
    digest = hashlib.scrypt(secret.encode(), salt=b"name of the cookie", n=2**14, r=8, p=1, dklen=6)
    return f"megatrain-{digest.hex()}"


def settings_of(section: DashboardConfig, *, is_port_asked: bool = False) -> DashboardSettings:
    """Return the settings of a section, with its files read. Raises: ConfigError with all mistakes."""
    problems = [
        f"{setting(f'dashboard.{name}', getattr(section, name))} {violation}"
        for name, option in options_of(DashboardConfig).items()
        if (violation := option.violation(getattr(section, name))) is not None
    ]
    problems += [problem.text for problem in dashboard_problems(section)]
    tokens = {}
    for name in ("viewer_token_file", "operator_token_file"):
        try:
            tokens[name] = _token(getattr(section, name), f"dashboard.{name}")
        except ConfigError as error:
            problems += error.problems
    if len(tokens) == 2 and tokens["viewer_token_file"] and len(set(tokens.values())) == 1:
        problems.append(
            "dashboard.viewer_token_file and operator_token_file contain the same token: every viewer would be an "
            "operator; use different tokens"
        )
    if problems:
        raise ConfigError(problems)
    return DashboardSettings(
        address=section.address,
        port=section.port,
        is_port_asked=is_port_asked,
        enable_actions=section.enable_actions,
        viewer_token=tokens["viewer_token_file"],
        operator_token=tokens["operator_token_file"],
        trusted_proxies=tuple(ip_network(text) for text in comma_list(section.trusted_proxies)),
        user_header=section.user_header.lower(),
        role_header=section.role_header.lower(),
        host_names=frozenset(name.lower() for name in comma_list(section.host_names)),
        base_path=section.base_path,
        perfetto_url=section.perfetto_url,
    )


def _token(path: str, key: str) -> str:
    """Return the token in a file that only its owner can read; "" for no file. Raises: ConfigError."""
    token = read_token(path, key, is_secret=True)
    if token and (not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(
            [f"{key}={path!r} contains characters that are not allowed in a header; use letters and digits"]
        )
    if token and len(token) < _MIN_TOKEN_CHARACTERS:
        found = f"{key}={path!r} contains a token of length {len(token)}, which could be guessed"
        raise ConfigError([f"{found}; use at least {_MIN_TOKEN_CHARACTERS}: openssl rand -hex 32 makes 64"])
    return token
