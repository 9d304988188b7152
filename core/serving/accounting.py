"""Around every route: the client's own id is checked and given back, each answer is counted, no error gets out."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hookline.serving.api_errors import ApiError, api_error
from hookline.serving.limits import Limits
from hookline.serving.metrics import Metrics

LABEL_HEADER = "x-request-id"


def error_response(error: ApiError) -> Response:
    """An error as an answer."""
    return Response(orjson.dumps(error.body()), error.status, headers=error.headers, media_type="application/json")


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
        status, complete = 0, False
        label = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")  # b"" is none

        async def counted(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                if label and self._is_sane(label):
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", label)]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            if label and not self._is_sane(label):
                raise ApiError(
                    400, f"X-Request-Id must be 1 to {self._most_chars} printable ASCII characters.",
                    param=LABEL_HEADER, code="invalid_value",
                )  # fmt: skip
            await self._app(scope, receive, counted)
        except Exception as error:
            if not status:
                await error_response(api_error(error))(scope, receive, counted)
            elif not complete:
                raise  # the connection has to be closed
        finally:
            route = scope.get("route")
            self._metrics.http(getattr(route, "path", None), scope["method"], status)

    def _is_sane(self, label: bytes) -> bool:
        return len(label) <= self._most_chars and all(0x20 <= byte < 0x7F for byte in label)


async def answer_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler of every error: an object of OpenAI's form."""
    return error_response(api_error(error))
