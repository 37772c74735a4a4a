"""Refusals: every error is answered with an ErrorDocument and the right status, never with a stack trace.

A route raises a RefusalError, made by one of the functions here. Errors of FastAPI, Starlette and megatrain are
converted to refusals. A request with an unknown parameter, or with a parameter that is given twice, is refused too: a
typing mistake must not get an answer to a different question.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError, MegatrainError
from megatrain_dashboard.responses.cache import JSON_TYPE, document_bytes
from megatrain_dashboard.responses.document import ErrorDocument

_logger = logging.getLogger(__name__)
_SHOWN_CHARACTERS = 80
_CODES = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "bad-request",
    408: "bad-request",
    409: "conflict",
    413: "too-large",
    429: "too-many",
    431: "too-large",
    503: "unavailable",
}


class RefusalError(Exception):
    """A request that is not answered or an action that is not carried out: the status and a sentence for people."""

    def __init__(self, status: int, text: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, dict(headers or {})


def bad_query(parameter: str, value: object, rule: str) -> RefusalError:
    """Return the refusal of one parameter. `rule` describes the allowed values."""
    return RefusalError(400, f"{parameter}={shown(value)}: {rule}")


def not_found(text: str) -> RefusalError:
    return RefusalError(404, text)


def conflict(text: str) -> RefusalError:
    return RefusalError(409, text)


def unavailable(text: str, *, retry_after_s: int = 2) -> RefusalError:
    return RefusalError(503, text, headers={"Retry-After": str(retry_after_s)})


def too_many(text: str, *, retry_after_s: int) -> RefusalError:
    return RefusalError(429, text, headers={"Retry-After": str(max(1, retry_after_s))})


def shown(value: object) -> str:
    """Return a value from a request as a refusal repeats it: quoted and cut to a maximal length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def refusal_response(refusal: RefusalError) -> Response:
    """Return the response for a refusal."""
    document = ErrorDocument(error=_CODES.get(refusal.status, "unavailable"), text=refusal.text)
    return Response(document_bytes(document), refusal.status, headers=refusal.headers, media_type=JSON_TYPE)


async def check_query(request: Request) -> None:
    """Refuse parameters that the route does not have, and parameters that are given twice. Raises: RefusalError."""
    route = request.scope.get("route")
    known = sorted(_parameters(route.dependant)) if isinstance(route, APIRoute) else []
    given: set[str] = set()
    for name, value in request.query_params.multi_items():
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise bad_query(shown(name).strip("'\""), value, f"this path has no such parameter; {there}")
        if name in given:
            raise bad_query(name, value, "given twice; give it once")
        given.add(name)


def _parameters(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_parameters(inner) for inner in dependant.dependencies))


class TooMuchDataError(DataError):
    """A request asks for more data than is read at once; the answer has status 413."""


def add_error_responses(app: FastAPI) -> None:
    """Add handlers to `app` that answer every error as a refusal."""

    async def of_refusal(request: Request, error: Any) -> Response:
        return refusal_response(error)

    async def of_validation(request: Request, error: Any) -> Response:
        return refusal_response(_of_validation(error))

    async def of_http(request: Request, error: Any) -> Response:
        return refusal_response(_of_http(request, error))

    async def of_megatrain(request: Request, error: Any) -> Response:
        return refusal_response(_of_megatrain(error))

    app.add_exception_handler(RefusalError, of_refusal)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(MegatrainError, of_megatrain)


def _of_validation(error: RequestValidationError) -> RefusalError:
    found = error.errors()[0]
    place, *names = (str(part) for part in found["loc"])
    if found["type"] == "json_invalid":
        return RefusalError(400, "the body is not JSON")
    if found["type"] == "missing":
        return RefusalError(400, f"{'.'.join(names) or place} is missing")
    rule = str(found["msg"]).replace("Input should be", "it must be").replace("String should", "it must")
    rule = rule.partition(", unable to")[0]
    return bad_query(".".join(names) or place, found.get("input"), rule)


def _of_http(request: Request, error: HTTPException) -> RefusalError:
    if error.status_code == 404:
        return RefusalError(404, f"{shown(request.url.path)}: no such path; api/v1/openapi.json lists the API")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        return RefusalError(
            405, f"this path does not allow {shown(request.method)}; use {allowed}", headers=error.headers
        )
    return RefusalError(error.status_code, str(error.detail), headers=error.headers)


def _of_megatrain(error: MegatrainError) -> RefusalError:
    """Return the refusal for an error of megatrain. Its cause is the job, not the request."""
    if isinstance(error, TooMuchDataError):
        return RefusalError(413, str(error))
    if isinstance(error, DataError):
        return RefusalError(404, str(error))
    return unavailable(str(error))


def internal_error(path: str, error: BaseException) -> Response:
    """Return the response for a bug of the dashboard. Only the server's log gets the details."""
    _logger.error("%s was not answered: internal error of the dashboard", shown(path), exc_info=error)
    return refusal_response(RefusalError(500, "internal error of the dashboard; its log has the details"))
