"""fsspec's drivers for URLs (s3://bucket/run, gs://..., hdfs://...), and the texts of their errors.

fsspec is imported when the first URL is opened.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any

from megatrain.contracts.errors import MegatrainError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_MAX_REASON_LENGTH = 300
_ERRORS = {FileNotFoundError: errno.ENOENT, IsADirectoryError: errno.EISDIR, NotADirectoryError: errno.ENOTDIR,
           FileExistsError: errno.EEXIST, PermissionError: errno.EACCES}  # fmt: skip


def split_url(text: str, kind: type[MegatrainError]) -> tuple[str, str] | None:
    """Return a URL's scheme and the rest; None for a path.

    Raises: `kind` when the URL contains a password.
    """
    match = _URL.fullmatch(text)
    if match is None:
        return None
    scheme, rest = match[1], match[2].rstrip("/")
    if re.match("[^/@]*:[^/@]*@", rest):
        shown = f"{scheme}://...@{rest.partition('@')[2]}"
        raise kind(
            f"{shown}: a password in a URL would appear in logs and in files; leave it to the configuration of the "
            f"driver for {scheme}://"
        )
    return scheme, rest


def driver(url: str, kind: type[MegatrainError]) -> Any:
    """Return fsspec's driver for a URL.

    Raises: `kind` when fsspec or the driver is not installed (the message names the package), or the driver fails.
    """
    try:
        import fsspec  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise kind(f"{url}: URLs need fsspec ({error}); pip install fsspec") from error
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:
        scheme = url.partition(":")[0]
        package = _package(scheme, error)
        raise kind(f"{url}: no driver for {scheme}:// is installed ({error}); pip install {package}") from error
    except Exception as error:
        raise kind(f"{url}: cannot be opened: {reason(error)}") from error


def endpoint(store: Any) -> str:
    """Return the address of the storage to which a driver connects; empty if the driver does not state one."""
    connected = getattr(getattr(store, "_s3", None), "meta", None)
    return str(getattr(connected, "endpoint_url", None) or getattr(store, "endpoint_url", None) or "")


def reason(error: Exception) -> str:
    """Return the text of an error: drivers often raise a system error without its text."""
    number = next((number for kind, number in _ERRORS.items() if isinstance(error, kind)), None)
    text = getattr(error, "strerror", None) or (os.strerror(number) if number else f"{type(error).__name__}: {error}")
    return str(text).partition("\n")[0][:_MAX_REASON_LENGTH]


def _package(scheme: str, error: ImportError) -> str:
    """Return the package to install: the driver, or the one that fsspec's own driver could not import."""
    from fsspec.registry import known_implementations  # type: ignore[import-untyped, unused-ignore]

    module = str(known_implementations.get(scheme, {}).get("class", scheme)).partition(".")[0]
    missing = next((e.name for e in (error.__cause__, error) if isinstance(e, ImportError) and e.name), None)
    return missing.partition(".")[0] if module == "fsspec" and missing else module
