"""Checks the origin of a request: the Host that it names, and the page that made it. Pure functions: no I/O, no clock.

A browser sends requests for any page, with the cookies of the dashboard, and any name may resolve to its address. So
the server answers only known names (against DNS rebinding), and a request that changes something must come from a page
of this dashboard (against forged requests).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from megatrain_dashboard.responses.errors import RefusalError, shown
from megatrain_dashboard.settings import DashboardSettings

REQUEST_HEADER = "x-megatrain-request"
"""A page of another origin can send this header only after a CORS preflight, which the dashboard never allows."""
SAFE_METHODS = ("GET", "HEAD")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class Origins:
    """The names under which a dashboard is reached."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._names = settings.allowed_names
        self._further = settings.host_names
        self._is_wildcard = settings.is_wildcard

    def check_host(self, host: str) -> None:
        """Refuse a Host that is not a name of this dashboard. Raises: RefusalError."""
        found = _HOST.fullmatch(host.lower())
        name = found["name"].strip("[]") if found else ""
        if name and (name in self._names or (self._is_wildcard and _is_address(name))):
            return
        raise RefusalError(403, f"Host {shown(host)}: not a name of this dashboard; add it to dashboard.host_names")

    def check_change(self, headers: Mapping[str, str], *, is_browser: bool) -> None:
        """Refuse a request that changes something if another site's page made it. Raises: RefusalError."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and not self._is_own(origin, headers["host"]):
            raise RefusalError(403, f"Origin {shown(origin)}: another page made this request; nothing was done")
        if site not in (None, "same-origin"):
            raise RefusalError(403, f"Sec-Fetch-Site {shown(site)}: another page made this request; nothing was done")
        if not is_browser:
            return
        if origin is None and site is None:
            raise RefusalError(403, "neither Origin nor Sec-Fetch-Site names the page of this request; send Origin")
        if headers.get(REQUEST_HEADER) != "1":
            raise RefusalError(
                403, "the header X-Megatrain-Request: 1 is missing, which the pages of the dashboard send"
            )

    def check_read(self, headers: Mapping[str, str]) -> None:
        """Refuse reads and streams of another site's page. Raises: RefusalError."""
        site = headers.get("sec-fetch-site")
        # a person may follow a link in a ticket; no person requests a frame or a picture of another page
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
        # a proxy may use another name than the browser did
        return is_same or (found is not None and found["name"] in self._further)


def _without_port(place: str, scheme: str) -> str:
    return place.removesuffix(f":{_DEFAULT_PORTS[scheme]}")


def _is_address(name: str) -> bool:
    """Return whether a name is an address; no name server returns addresses under their own name."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
