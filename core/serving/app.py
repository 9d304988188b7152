"""The application: all routes, and errors in OpenAI's form whatever goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from hookline.errors import HooklineError
from hookline.plugins import engine_version
from hookline.serving import openapi, routes
from hookline.serving.accounting import Accounting, answer_error, answer_nobody, error_response
from hookline.serving.api_errors import ApiError
from hookline.serving.front import Front
from hookline.serving.guards import Guards


class Application(FastAPI):
    """FastAPI with our own OpenAPI document and without the pages that load code from elsewhere."""

    def __init__(self) -> None:
        super().__init__(
            title="Hookline",
            version=engine_version() or "unknown",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            exception_handlers={
                ApiError: answer_error,
                HooklineError: answer_error,
                HTTPException: _answer_http_error,
                ClientDisconnect: answer_nobody,
                Exception: answer_error,  # Starlette raises it again behind the answer: see `Accounting`
            },
        )

    def openapi(self) -> dict[str, Any]:
        """The document; made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi.complete(super().openapi(), routes.BODIES)
        return self.openapi_schema


def make_app(front: Front, routers: Sequence[APIRouter] = ()) -> ASGIApp:
    """The application of a server: its routes behind the guards, and all of it accounted for.

    Args:
        routers: of probes and pages.
    """
    app = Application()
    for router in (routes.make_router(front), *routers):
        app.include_router(router)
    return Accounting(Guards(app, front.config), front.config.limits, front.metrics)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """FastAPI's own errors: no such route, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    told = ApiError(status, "There is no such route.", code="not_found")
    if status == 405:
        told = ApiError(405, "This route has other methods.", code="method_not_allowed")
    elif status != 404:
        told = ApiError(status, "The request was refused.")
    response = error_response(told)
    allowed = (getattr(error, "headers", None) or {}).get("Allow")
    if allowed is not None:
        response.headers["allow"] = allowed
    return response
