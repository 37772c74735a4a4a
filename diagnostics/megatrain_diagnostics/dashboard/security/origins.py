"""Whether a request may come from where it comes: the Host that it names, the page that made it. Pure.

A browser carries out what any page tells it, with our cookies, and resolves any name to our address. So only known
names are answered (DNS rebinding), and what changes something must come from a page of ours (forged requests).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from megatrain_diagnostics.dashboard.answers.errors import RefusalError, shown
from megatrain_diagnostics.dashboard.settings import DashboardSettings

REQUEST_HEADER = "x-megatrain-request"
"""A page of another origin cannot send it without being asked by us, and we never say yes."""
SAFE_METHODS = ("GET", "HEAD")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class Origins:
    """The names under which a dashboard is asked for."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._names = settings.allowed_names
        self._further = settings.host_names
        self._is_wildcard = settings.is_wildcard

    def check_host(self, host: str) -> None:
        """Refuse a Host that is none of ours. Raises: RefusalError."""
        found = _HOST.fullmatch(host.lower())
        name = found["name"].strip("[]") if found else ""
        if name and (name in self._names or (self._is_wildcard and _is_address(name))):
            return
        raise RefusalError(
            403, f"Host {shown(host)}: this dashboard is not known by that name; dashboard.host_names adds one"
        )

    def check_change(self, headers: Mapping[str, str], *, is_browser: bool) -> None:
        """Refuse a request that changes something and was made by a page that is not ours. Raises: RefusalError."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and not self._is_own(origin, headers["host"]):
            raise RefusalError(403, f"Origin {shown(origin)}: another page made this request; nothing was done")
        if site not in (None, "same-origin"):
            raise RefusalError(403, f"Sec-Fetch-Site {shown(site)}: another page made this request; nothing was done")
        if not is_browser:
            return
        if origin is None and site is None:
            raise RefusalError(403, "neither Origin nor Sec-Fetch-Site says which page made this request; send Origin")
        if headers.get(REQUEST_HEADER) != "1":
            raise RefusalError(403, "the header X-Megatrain-Request: 1 is missing, which pages of ours send")

    def check_read(self, headers: Mapping[str, str]) -> None:
        """Refuse that a page of somebody else's reads, or opens streams. Raises: RefusalError."""
        site = headers.get("sec-fetch-site")
        # a link in a ticket may be followed; a frame or a picture of another page is not a person's request
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if site not in (None, "same-origin", "none") and not is_link:
            raise RefusalError(403, f"Sec-Fetch-Site {shown(site)}: the API is for pages of this dashboard")

    def _is_own(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin.lower())
        except ValueError:
            return False
        if parts.scheme not in _DEFAULT_PORTS or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            return False
        is_same = _without_port(parts.netloc, parts.scheme) == _without_port(host.lower(), parts.scheme)
        found = _HOST.fullmatch(parts.netloc)
        # a proxy may ask under another name than the browser did
        return is_same or (found is not None and found["name"] in self._further)


def _without_port(place: str, scheme: str) -> str:
    return place.removesuffix(f":{_DEFAULT_PORTS[scheme]}")


def _is_address(name: str) -> bool:
    """Tell an address, which no name server gives out, from a name."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
