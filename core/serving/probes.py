"""Probes for those who watch over a server: Kubernetes, load balancers, benchmarks. They cost next to nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hookline.scheduling.output import Load
from hookline.serving.accounting import json_response
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.limits import RETRY_SECONDS

_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {"type": "string", "enum": ["starting", "ready", "stalled", "draining", "dead"]},
        "stage": {"type": "string"},
        "progress": {"type": "number", "minimum": 0, "maximum": 1},
        "stages": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}
_FRESH = {"cache-control": "no-store"}
_LOAD = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("server_load", "running", "waiting", "used_blocks")},
}


def _described(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


_ALWAYS: dict[int | str, dict[str, Any]] = {200: _described("What state it is in.", _STATUS)}
_READY: dict[int | str, dict[str, Any]] = {
    200: _described("Ready.", _STATUS),
    503: _described("Not ready: it starts, ends, stalls, or the engine is dead.", _STATUS),
}


def make_router(lifecycle: Lifecycle, load: Callable[[], Load]) -> APIRouter:
    """The routes of the probes.

    `/health`, `/readyz` and `/startup` answer with 503 until the model is there, `/livez` and `/ping` never.

    Args:
        load: what the engine last said of its work.
    """
    router = APIRouter(default_response_class=Response)

    async def ready(request: Request) -> Response:
        """Whether requests are served: the engine has given a sign of life within 5 s, and nothing ends."""
        return _answer(lifecycle, 200 if lifecycle.is_ready else 503)

    async def live(request: Request) -> Response:
        """Whether the HTTP process answers, whatever the engine does."""
        return _answer(lifecycle, 200)

    async def startup(request: Request) -> Response:
        """Whether the start is done, and the seconds that each of its stages took."""
        return _answer(lifecycle, 503 if lifecycle.state in ("starting", "dead") else 200)

    async def show_load(request: Request) -> Response:
        """How much runs and waits; `server_load`, which routers read, is both together."""
        found = load()
        shown = {"server_load": found.running + found.waiting, "running": found.running, "waiting": found.waiting}
        shown["used_blocks"] = found.used_blocks
        return json_response(shown, headers=_FRESH)

    def add(route: Callable[[Request], Awaitable[Response]], paths: str, responses: Mapping[int | str, Any]) -> None:
        for path in paths.split():
            router.add_api_route(path, route, name=path[1:], responses=dict(responses))
            router.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)

    add(ready, "/health /readyz", _READY)
    add(live, "/livez /ping", _ALWAYS)
    add(startup, "/startup", _READY)
    add(show_load, "/load", {200: _described("The load.", _LOAD)})
    return router


def _answer(lifecycle: Lifecycle, status: int) -> Response:
    response = json_response(lifecycle.to_dict(), status, _FRESH)
    if status == 503:
        response.headers["retry-after"] = str(RETRY_SECONDS)
    return response
