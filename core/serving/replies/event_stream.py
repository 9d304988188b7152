"""Server-sent events over ASGI for many small writes: no task a chunk, and a reader who stalls is let go.

See https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

# Under this name the connection's protocol puts a function into a scope's extensions that drops the connection at once,
# with all that a client has not taken; ASGI itself has no such thing.
DROP_CONNECTION = "hookline.drop_connection"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_COMMENT = b": still here\n\n"


class ClientGone(Exception):
    """The client has closed the connection, or takes nothing any more."""


async def wait_for_leave(receive: Receive) -> None:
    """Returns when the client closes the connection. To be called when the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream:
    """One response of server-sent events.

    Args:
        ping_seconds: how long the stream may be silent before a comment keeps it alive.
        reader_seconds: how long the client may let the bytes lie.

    Attributes:
        opened, closed: whether its head and its end have been sent.
    """

    def __init__(self, scope: Scope, send: Send, *, ping_seconds: float, reader_seconds: float) -> None:
        self.opened = False
        self.closed = False
        self._scope = scope
        self._send = send
        self._ping_seconds = ping_seconds
        self._reader_seconds = reader_seconds
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()

    async def open(self) -> None:
        """Sends the head; from here on errors are events."""
        self.opened = True
        await self._pass_on({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Sends events, which are whole.

        Args:
            last: end the response behind them.

        Raises:
            ClientGone: if the client takes nothing for too long.
        """
        self._written = self._loop.time()
        await self._pass_on({"type": "http.response.body", "body": events, "more_body": not last})
        self.closed = last

    async def keep_alive(self) -> None:
        """Sends a comment if nothing has been sent for long."""
        if self._loop.time() - self._written >= self._ping_seconds * 0.9:  # a clock may wake a little early
            await self.write(_COMMENT)

    def drop(self) -> None:
        """Closes the connection without a wait for the client to take what there is."""
        extensions: Mapping[str, Any] = self._scope.get("extensions") or {}
        if DROP_CONNECTION in extensions:
            extensions[DROP_CONNECTION]()

    async def _pass_on(self, message: dict[str, Any]) -> None:
        # The server's `send` waits only while the connection's buffer is full.
        try:
            async with asyncio.timeout(self._reader_seconds):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGone("the client takes nothing") from error
        except OSError as error:
            raise ClientGone("the client has closed the connection") from error
