"""One request in the engine process, as the HTTP process follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from hookline.scheduling.output import OutputDelta

if TYPE_CHECKING:
    from hookline.serving.process.async_engine import AsyncEngine


class Answer:
    """One request in the engine: its news, until its end. For one task to read.

    Attributes:
        started: `time.monotonic()` when it began to run; None while it waits.
        finished: whether all of its news has been taken, the end included.

    Args:
        on_news: is told of each delta as it comes, before anybody takes it.
    """

    def __init__(self, number: int, engine: AsyncEngine, on_news: Callable[[OutputDelta], None] | None = None) -> None:
        self.number = number
        self.started: float | None = None
        self.finished = False
        self._engine = engine
        self._on_news = on_news
        self._news: dict[int, OutputDelta] = {}
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def deltas(self) -> list[OutputDelta]:
        """Waits for news: one delta of each continuation that has any, what came meanwhile joined.

        Raises:
            InvalidRequestError, NotEnoughMemoryError: the engine does not take the request.
            HooklineError: it failed at taking it.
            ServerError: the engine has died.
            RuntimeError: the end has been taken already.
        """
        while not self._news:
            if self._error is not None:
                self.finished = True
                raise self._error
            if self._ended:
                raise RuntimeError("the answer's end has been taken already")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, {}
        self.finished = self._ended and self._error is None  # an error comes behind what came before it
        return list(news.values())

    def abort(self) -> None:
        """Ends the request in the engine; nothing more is told of it. Of no effect after its end."""
        if not self._ended:
            self._ended = True
            self._engine.forget(self)

    def take(self, delta: OutputDelta) -> None:
        """More of the answer."""
        if self._on_news is not None:
            self._on_news(delta)
        before = self._news.get(delta.index)
        if before is None:
            self._news[delta.index] = delta
        else:
            _join(before, delta)
        self._ended = self._ended or delta.timing is not None

    def fail(self, error: Exception) -> None:
        """There will be nothing more but this."""
        self._ended, self._error = True, error

    def wake(self) -> None:
        """Lets the reader go on."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _join(delta: OutputDelta, later: OutputDelta) -> None:
    delta.text += later.text
    delta.token_ids += later.token_ids
    if later.logprobs is not None:
        delta.logprobs = (delta.logprobs or []) + later.logprobs
    delta.finish_reason, delta.stop_reason = later.finish_reason, later.stop_reason
    delta.error, delta.timing, delta.cached_tokens = later.error, later.timing, later.cached_tokens
