"""The description of the HTTP API, <prefix>/openapi.json.

It is generated from the routes and documents of the API, so it cannot differ from the responses.
"""

from __future__ import annotations

import json

from fastapi import Depends, FastAPI
from starlette.responses import Response

from megatrain_dashboard.responses.cache import JSON_TYPE
from megatrain_dashboard.responses.errors import check_query


def add_openapi(app: FastAPI, prefix: str) -> None:
    """Add the route that describes `app`. Call it after all routes of the API are added."""

    @app.get(f"{prefix}/openapi.json", include_in_schema=False, dependencies=[Depends(check_query)])
    async def openapi_json() -> Response:
        return Response(json.dumps(app.openapi()), media_type=JSON_TYPE)
