"""Bodies on their way in: received, read and worked on, within bounds that hold for all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from hookline.serving.api_errors import ApiError
from hookline.serving.guards import parse_object
from hookline.serving.limits import RETRY_SECONDS, Limits
from hookline.serving.replies.event_stream import wait_for_leave

# Bodies beyond this are read and worked on in a thread, so that others go on meanwhile. Those within it do not count
# for the bound on all of them, so that large ones cannot keep them out; connections bound their number.
LARGE_BODY = 32 * 2**10
# Of a length that can be right; Python makes no number of thousands of digits.
_MOST_DIGITS = 19
# Threads that work at a time; what comes beyond them waits. More would only share one lock.
THREADS = 4

Result = TypeVar("Result")


class Intake:
    """Takes bodies in.

    A thread cannot be ended. When its client has gone, or has waited long enough, nobody waits for it any more; but it
    goes on to the end of its work, and its body counts until then. What keeps that short: a body has at most
    `body_bytes`, a chat template is stopped after a second of processor time, and a prompt is measured by its beginning
    before all of it is encoded.

    Args:
        limits: `body_bytes`, `bodies`, `json_depth`, `queue_seconds` and `request_seconds` count.

    Attributes:
        held: bytes of the large bodies that are being received or worked on.
    """

    def __init__(self, limits: Limits) -> None:
        self.held = 0
        self._limits = limits
        self._most = limits.bodies * limits.body_bytes
        self._seconds = min(limits.queue_seconds, limits.request_seconds)
        self._threads = ThreadPoolExecutor(THREADS, "intake")

    async def read(self, request: Request, work: Callable[[dict[str, Any]], Result]) -> Result:
        """What `work` makes of a request's body, a JSON object.

        How long the body may take to come is the connection's matter: see `protocol`.

        Raises:
            ApiError: 413 if it is too large, 400 if it is no sound JSON object, 503 if too many bodies are there or the
                work was not done in time; as `work`.
            ClientDisconnect: if the client has gone.
        """
        with ExitStack() as stack:
            bodies = [await self._receive(request, stack.enter_context(self._share()))]
            is_large = len(bodies[0]) > LARGE_BODY

            def read() -> Result:
                return work(parse_object(bodies.pop(), self._limits.json_depth))

            if not is_large:
                return read()
            pending = self._threads.submit(read)
            done = asyncio.wrap_future(pending)
            release = stack.pop_all().close
            done.add_done_callback(lambda future: _let_go(future, release))
            leaving = asyncio.create_task(wait_for_leave(request.receive))
            either: set[asyncio.Future[Any]] = {done, leaving}
            try:
                await asyncio.wait(either, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if pending.cancel():  # no thread has begun with it; but it stands in their queue still
                    bodies.clear()
            if done.done():
                return done.result()
            if leaving.done():
                raise ClientDisconnect
            what = f"The request's body was not checked within {self._seconds:g} s: the server is overloaded."
            raise ApiError(503, what, code="queue_deadline", retry_after=RETRY_SECONDS)

    async def _receive(self, request: Request, hold: Callable[[int], None]) -> bytes:
        most = self._limits.body_bytes
        told = request.headers.get("content-length", "").lstrip("0")
        if told.isdecimal() and (len(told) > _MOST_DIGITS or int(told) > most):
            raise _too_large(most)
        body = bytearray()
        async for part in request.stream():
            if len(body) + len(part) > most:
                raise _too_large(most)
            hold(len(body) + len(part))
            body += part
        return bytes(body)

    @contextmanager
    def _share(self) -> Iterator[Callable[[int], None]]:
        """What one body takes of the room for all: to be told the size that it has come to, before it grows to that."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            more = (size if size > LARGE_BODY else 0) - mine
            if self.held + more > self._most:
                what = f"The server has {self.held} bytes of bodies to work on and takes {self._most}. Try again later."
                raise ApiError(503, what, code="overloaded", retry_after=RETRY_SECONDS)
            self.held += more
            mine += more

        try:
            yield hold
        finally:
            self.held -= mine


def _let_go(future: asyncio.Future[Any], release: Callable[[], None]) -> None:
    """The work of a thread is over: its body is released, and an error that nobody waits for any more is left aside."""
    release()
    if not future.cancelled():
        future.exception()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body has more than {most} bytes.", code="body_too_large")
