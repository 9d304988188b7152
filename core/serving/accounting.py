"""Around the guards and every route: the client's own id is given back, each answer is counted, no error gets out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hookline.serving.api_errors import ApiError, api_error
from hookline.serving.limits import Limits
from hookline.serving.metrics import Metrics

LABEL_HEADER = "x-request-id"
# Under this name the connection's protocol puts into a scope's state the status that it gave in an application's place.
REFUSED = "refused"
# What the field calls a call whose client went before there was an answer; it is counted and never sent.
_CLIENT_GONE = 499


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error as an answer."""
    return json_response(error.body(), error.status, error.headers)


def find_label(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's own id of a request; b"" is none."""
    return next((value for name, value in headers if name == b"x-request-id"), b"")


def is_label(label: bytes, most_chars: int) -> bool:
    """Whether a client's id is one, so that it may be given back."""
    return 0 < len(label) <= most_chars and all(0x20 <= byte < 0x7F for byte in label)


class Accounting:
    """Pure ASGI: costs one call more for each message, and no task.

    Args:
        app: what to put it around.
    """

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._most_chars = limits.label_chars
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, complete, begun = 0, False, time.monotonic()
        label = find_label(scope["headers"])
        shown = [(b"x-request-id", label)] if is_label(label, self._most_chars) else []

        async def counted(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *shown]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if not status:
                await error_response(api_error(error))(scope, receive, counted)
            elif not complete:
                raise  # the connection has to be closed
        finally:
            status = scope.get("state", {}).get(REFUSED, status or _CLIENT_GONE)
            route = getattr(scope.get("route"), "path", None)
            self._metrics.http(route, scope["method"], status, time.monotonic() - begun)


async def answer_nobody(request: Request, error: Exception) -> Response:
    """FastAPI's handler of a client that has gone."""
    return Response(status_code=_CLIENT_GONE)


async def answer_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler of every error: an object of OpenAI's form."""
    return error_response(api_error(error))
