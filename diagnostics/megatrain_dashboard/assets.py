"""The page and its files: a table of the installed files, made at start. No request path reaches the file system."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from megatrain_dashboard.responses.errors import not_found, shown, unavailable
from megatrain_dashboard.security.headers import IMMUTABLE

_PAGE = "index.html"
_PAGE_PATH = re.compile(r"[a-z0-9-]{0,40}")
"""Paths that return the page. They have one level only, because the page names its files by relative addresses."""
_REVALIDATED = "no-cache"
_MIN_COMPRESSED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent. `compressed`: None where compression gains nothing."""

    body: bytes
    compressed: bytes | None
    media_type: str
    etag: str
    cache_control: str


def installed_assets() -> dict[str, Asset]:
    """Return path -> file of all built files; paths are relative to the page."""
    root = resources.files("megatrain_dashboard") / "static"
    return {path: _asset(path, file.read_bytes()) for path, file in _below(root, "")} if root.is_dir() else {}


def _below(directory: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in directory.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _below(entry, f"{path}/")
        elif entry.is_file():
            yield path, entry


def _asset(path: str, body: bytes) -> Asset:
    guessed = mimetypes.guess_type(path)[0] or "application/octet-stream"
    is_text = guessed.startswith("text/") or guessed in ("application/javascript", "image/svg+xml", "application/json")
    compressed = gzip.compress(body, 9, mtime=0) if is_text and len(body) >= _MIN_COMPRESSED_BYTES else None
    return Asset(
        body=body,
        compressed=compressed,
        media_type=f"{guessed}; charset=utf-8" if is_text else guessed,
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        # names below assets/ contain a hash of the content
        cache_control=IMMUTABLE if path.startswith("assets/") else _REVALIDATED,
    )


def router(assets: Mapping[str, Asset], base_path: str) -> APIRouter:
    """Return the route of all paths outside the API."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/{path:path}")
    async def page_or_file(request: Request, path: str) -> Response:
        if base_path and f"/{path}" == base_path:
            return RedirectResponse(f"{base_path}/", 308)
        name = _PAGE if _PAGE_PATH.fullmatch(path) else path
        asset = assets.get(name)
        if asset is None and name == _PAGE:
            raise unavailable("this installation does not contain the files of the page; the API is below api/v1/")
        if asset is None:
            hint = "; api/v1/openapi.json lists the API" if path.startswith("api/") else ""
            raise not_found(f"{shown(f'/{path}')}: no such file or path{hint}")
        return _response(request, asset)

    return routes


def _response(request: Request, asset: Asset) -> Response:
    headers = {"etag": asset.etag, "cache-control": asset.cache_control, "vary": "Accept-Encoding"}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if asset.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(asset.compressed, media_type=asset.media_type, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
