"""Rules of the section [dashboard]: a missing setting grants no access, and every setting has an effect."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

from megatrain.config.dashboard import DashboardConfig
from megatrain.config.problem import Problem
from megatrain.config.toml_text import value_text
from megatrain.contracts.network_address import is_loopback

_TOKEN_KEYS = ("dashboard.viewer_token_file", "dashboard.operator_token_file")
_MAX_HOST_NAMES = 64


def dashboard_problems(found: DashboardConfig) -> Iterator[Problem]:
    """Yield what is wrong with the section by itself."""
    has_tokens = bool(found.viewer_token_file or found.operator_token_file)
    if not is_loopback(found.address) and not has_tokens and not found.trusted_proxies:
        yield Problem(
            ("dashboard.address", *_TOKEN_KEYS, "dashboard.trusted_proxies"),
            f"dashboard.address={value_text(found.address)} can be reached from other machines, so users must be "
            f"authenticated: set dashboard.viewer_token_file or operator_token_file, or trusted_proxies, or use "
            f'address="127.0.0.1"',
        )
    if found.viewer_token_file and found.viewer_token_file == found.operator_token_file:
        yield Problem(
            _TOKEN_KEYS,
            f"dashboard.viewer_token_file and operator_token_file are both {value_text(found.viewer_token_file)}: "
            f"every viewer would be an operator; name two files",
        )
    yield from _action_problems(found)
    yield from _proxy_problems(found)
    if len(comma_list(found.host_names)) > _MAX_HOST_NAMES:
        yield Problem(
            ("dashboard.host_names",),
            f"dashboard.host_names holds {len(comma_list(found.host_names))} names; use at most {_MAX_HOST_NAMES}",
        )


def _action_problems(found: DashboardConfig) -> Iterator[Problem]:
    authenticates_users = found.viewer_token_file or found.trusted_proxies
    if found.enable_actions and authenticates_users and not found.operator_token_file and not found.role_header:
        yield Problem(
            ("dashboard.enable_actions", "dashboard.operator_token_file", "dashboard.role_header"),
            "dashboard.enable_actions=true lets operators act, but no operator can sign in; set "
            "dashboard.operator_token_file, or role_header with trusted_proxies, or use enable_actions=false",
        )


def _proxy_problems(found: DashboardConfig) -> Iterator[Problem]:
    for text in comma_list(found.trusted_proxies):
        reason = _network_problem(text)
        if reason:
            yield Problem(
                ("dashboard.trusted_proxies",),
                f"dashboard.trusted_proxies={value_text(found.trusted_proxies)}: {value_text(text)} {reason}",
            )
    if found.trusted_proxies and not found.user_header:
        yield Problem(
            ("dashboard.trusted_proxies", "dashboard.user_header"),
            f"dashboard.trusted_proxies={value_text(found.trusted_proxies)} needs dashboard.user_header, found "
            f'""; name the header in which the proxies send the user, such as "X-Forwarded-User"',
        )
    for name in ("user_header", "role_header"):
        if getattr(found, name) and not found.trusted_proxies:
            yield Problem(
                (f"dashboard.{name}", "dashboard.trusted_proxies"),
                f"dashboard.{name}={value_text(getattr(found, name))} does nothing without dashboard.trusted_proxies: "
                f'any client could send it; name the proxies\' addresses, or use {name}=""',
            )
    if found.role_header and found.role_header.lower() == found.user_header.lower():
        yield Problem(
            ("dashboard.role_header", "dashboard.user_header"),
            f"dashboard.role_header and user_header are both {value_text(found.user_header)}; name two headers",
        )


def comma_list(text: str) -> tuple[str, ...]:
    """Return the elements of a list that is written with commas."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _network_problem(text: str) -> str:
    try:
        network = ip_network(text)
    except ValueError:
        return "is not an address or network; use for example 10.1.2.3 or 10.0.0.0/8"
    if network.prefixlen == 0:
        return "contains every address; name the proxies"
    return ""
