"""A client's call at work: let in, submitted, its news joined, ended in time, and counted once.

received -> validated -> queued -> running -> ended(reason)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from starlette.types import Receive

from hookline.errors import InvalidRequestError, ServerError
from hookline.grammar import GrammarSpec
from hookline.scheduling.output import NO_TOKEN, OutputDelta
from hookline.serving.api_errors import ApiError, api_error
from hookline.serving.limits import RETRY_SECONDS, Limits
from hookline.serving.process.answer import Answer
from hookline.serving.process.async_engine import AsyncEngine
from hookline.serving.replies.event_stream import ClientGone, wait_for_leave
from hookline.serving.requests.grammars import GrammarCompiler
from hookline.serving.requests.validated import ValidatedCall, ValidatedRequest

_log = logging.getLogger(__name__)

# Steps by which the reader of many answers may be behind, whatever `Limits.reader_values` says.
_STEPS_BEHIND = 32
# That a client has at least to read what the engine has done with.
_READ_SECONDS = 1.0


def shutting_down() -> ApiError:
    """What a client is told while the server ends."""
    return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=RETRY_SECONDS)


def engine_gone() -> ApiError:
    """What a client is told when the engine has died."""
    return ApiError(503, "The engine has stopped.", code="engine_dead", retry_after=RETRY_SECONDS)


def client_error(error: Exception) -> ApiError:
    """What a client is told of an error of its call."""
    return engine_gone() if type(error) is ServerError else api_error(error)


class CallClock:
    """Ends the work of a call from outside: `async with` it, and the cause is raised inside.

    The causes: the client leaves, a deadline passes, the server ends.

    Args:
        limits: `queue_seconds` and `request_seconds` count.
        receive: ASGI's; the request's body has been read.
        has_begun: whether the engine works on the call.
    """

    def __init__(self, limits: Limits, receive: Receive, has_begun: Callable[[], bool]) -> None:
        self._limits = limits
        self._receive = receive
        self._has_begun = has_begun
        self._cause: Exception | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(self._limits.request_seconds)
        await self._timeout.__aenter__()
        self._queue_timer = loop.call_later(self._limits.queue_seconds, self._check_begun)
        self._watcher = loop.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue_timer.cancel()
        self._watcher.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            seconds = self._limits.request_seconds
            raise self._cause or ApiError(
                503, f"The request was not done after {seconds:g} s.", code="deadline", retry_after=RETRY_SECONDS
            ) from None

    def end(self, cause: Exception) -> None:
        """Has `cause` raised inside, unless another was first."""
        if self._cause is None and not self._timeout.expired():
            self._cause = cause
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _watch(self) -> None:
        await wait_for_leave(self._receive)
        self.end(ClientGone("the client has closed the connection"))

    def _check_begun(self) -> None:
        if not self._has_begun():
            seconds = self._limits.queue_seconds
            why = "the server is overloaded, or has not prepared the request's constraints yet"
            message = f"The request waited {seconds:g} s without a start: {why}."
            self.end(ApiError(503, message, code="queue_deadline", retry_after=RETRY_SECONDS))


class RunningCall:
    """A call's prompts in the engine.

    Args:
        most_values: that may wait to be taken, see `Limits.reader_values`, and those of a few steps in any case.

    Attributes:
        unfinished: continuations whose end has not been taken.
        answers: continuations that it asks for.
        admitted: those that `Calls` has let in, and that the engine has not ended.
        end: ends the work of a call from outside.
        free_place: tells `Calls` that the engine has ended one of them, whenever its client takes it.
    """

    def __init__(self, call: ValidatedCall, most_values: int) -> None:
        self.call = call
        self.answers = self.unfinished = sum(prompt.params.n for prompt in call.prompts)
        self.admitted = 0
        self.end: Callable[[Exception], None] = _nothing_to_end
        self.free_place: Callable[[RunningCall], None] = _no_place_to_free
        of_step = sum(prompt.params.n * (2 + (prompt.params.logprobs or 0)) for prompt in call.prompts)
        self._most_values = max(most_values, _STEPS_BEHIND * of_step)
        self._values = 0  # that have come and have not been taken
        self._is_awaited = False  # by whoever takes all of them then
        self._answers: list[Answer] = []
        self._news: asyncio.Queue[tuple[int, list[OutputDelta] | Exception]] | None = None
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun with any of its prompts."""
        return any(answer.started is not None for answer in self._answers)

    def submit(self, engine: AsyncEngine, grammars: dict[GrammarSpec, bytes]) -> None:
        """Hands all prompts to the engine."""
        for prompt in self.call.prompts:
            grammar = None if prompt.grammar is None else grammars[prompt.grammar]
            self._answers.append(
                engine.submit(prompt, stream=self.call.stream, grammar=grammar, on_news=self._count_in)
            )
        if len(self._answers) > 1:
            self._news = asyncio.Queue(maxsize=len(self._answers))
            self._pumps = [
                asyncio.create_task(_pump(number, answer, self._news)) for number, answer in enumerate(self._answers)
            ]

    async def news(self, seconds: float | None = None) -> tuple[int, list[OutputDelta]] | None:
        """Waits for news: a prompt's number and a delta of each of its continuations that has any.

        Args:
            seconds: how long to wait; None for ever.

        Returns:
            None if nothing came in time.

        Raises:
            InvalidRequestError, NotEnoughMemoryError, ServerError: as the engine's answers do.
            ApiError: if the engine failed at a continuation, or ended it.
        """
        self._is_awaited = True
        try:
            async with asyncio.timeout(seconds):
                number, deltas = await self._next()
        except TimeoutError:
            return None
        finally:
            self._is_awaited = False
        for delta in deltas:
            self._values -= _values(delta)
            if delta.finish_reason is not None:
                self.unfinished -= 1
                if delta.finish_reason not in ("stop", "length"):
                    raise _fault(delta, self.call.prompts[number])
        return number, deltas

    def _count_in(self, delta: OutputDelta) -> None:
        """What a stream's client does not take is kept up to a bound; of a whole answer nothing can be taken before."""
        if delta.finish_reason is not None:
            self.free_place(self)
        self._values += _values(delta)
        if self.call.stream and not self._is_awaited and self._values > self._most_values:
            self.end(ClientGone("the client takes too little"))

    async def _next(self) -> tuple[int, list[OutputDelta]]:
        if self._news is None:
            return 0, await self._answers[0].deltas()
        number, found = await self._news.get()
        if isinstance(found, Exception):
            raise found
        return number, found

    def abort(self) -> None:
        """Ends what has not ended; harmless after the end."""
        for pump in self._pumps:
            pump.cancel()
        for answer in self._answers:
            answer.abort()


def _nothing_to_end(cause: Exception) -> None:
    raise RuntimeError("the call is not at work") from cause


def _no_place_to_free(running: RunningCall) -> None:
    raise RuntimeError("the call has not been let in")


def _values(delta: OutputDelta) -> int:
    """Tokens of a delta, and log probabilities that are reported of them; a prompt's come once and do not count."""
    return len(delta.token_ids) + sum(1 + len(entry.top) for entry in delta.logprobs or ())


async def _pump(number: int, answer: Answer, news: asyncio.Queue[tuple[int, list[OutputDelta] | Exception]]) -> None:
    """Passes on an answer's news. While nobody takes them the queue is full, and they are joined in the answer."""
    while not answer.finished:
        try:
            deltas = await answer.deltas()
        except Exception as error:
            await news.put((number, error))
            return
        await news.put((number, deltas))


def _fault(delta: OutputDelta, prompt: ValidatedRequest) -> ApiError:
    params = prompt.params
    if delta.error == NO_TOKEN and (prompt.grammar or params.allowed_token_ids or params.bad_words):
        return ApiError(400, "The request's own options leave no token to choose.", code="no_token_left")
    if delta.finish_reason == "abort":
        return ApiError(503, "The engine ended the request.", code="aborted", retry_after=RETRY_SECONDS)
    return api_error(RuntimeError(delta.error or f"a continuation ended with {delta.finish_reason}"))


class Calls:
    """All calls of the server that are at work: lets new ones in, and can end them all.

    A client who reads slowly what the engine has done with takes no place from others. If more such answers lie here
    than may be in the engine, the calls that have lain for longest are dropped.

    Args:
        limits: `waiting` and the deadlines count.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._clocks: set[CallClock] = set()
        self._open = 0  # continuations in the engine
        self._most = 0  # that may be there
        self._unread: dict[RunningCall, float] = {}  # since when the engine has done with a call, the oldest first
        self._unread_answers = 0

    def __len__(self) -> int:
        return len(self._clocks)

    def end_all(self, cause: Exception) -> None:
        """Ends every call, such as when the time for running ones is over at a shutdown."""
        for clock in tuple(self._clocks):
            clock.end(cause)

    def admit(self, running: RunningCall, max_running: int) -> None:
        """Lets a call in: as many continuations as can run at once, and `waiting` more.

        Raises:
            InvalidRequestError: if it alone is more than that.
            ApiError: 429, if too many are there.
        """
        wanted, most = running.unfinished, self.limits.waiting + max_running
        if wanted > most:
            raise InvalidRequestError(
                f"prompts times n make {wanted} answers; the server takes {most} at once", field="n"
            )
        if self._open + wanted > most:
            raise ApiError(
                429, f"{self._open} answers are at work or wait; the server takes {most}. Try again later.",
                code="queue_full", retry_after=RETRY_SECONDS,
            )  # fmt: skip
        self._open += wanted
        self._most = most
        running.admitted = wanted
        running.free_place = self._free_place

    def _free_place(self, running: RunningCall) -> None:
        """The engine has done with one continuation."""
        self._open -= 1
        running.admitted -= 1
        if not running.admitted:
            self._unread[running] = time.monotonic()
            self._unread_answers += running.answers
            if self._unread_answers > self._most:
                self._drop_slowest()

    def _drop_slowest(self) -> None:
        """Ends the calls that have lain for longest, until no more answers are unread than may be."""
        excess, now = self._unread_answers - self._most, time.monotonic()
        for running, since in self._unread.items():
            if excess <= 0 or now - since < _READ_SECONDS:
                return
            excess -= running.answers
            running.end(ClientGone("the client takes too little, and others need the room"))

    @asynccontextmanager
    async def work(self, running: RunningCall, receive: Receive) -> AsyncIterator[None]:
        """`async with` it: the call's clock runs, and whatever way it ends nothing of it is left in the engine."""
        async with CallClock(self.limits, receive, lambda: running.has_begun) as clock:
            self._clocks.add(clock)
            running.end = clock.end
            try:
                yield
            finally:
                running.abort()
                self._clocks.discard(clock)
                self._open -= running.admitted
                running.admitted = 0
                if self._unread.pop(running, None) is not None:
                    self._unread_answers -= running.answers


async def compile_grammars(call: ValidatedCall, grammars: GrammarCompiler) -> dict[GrammarSpec, bytes]:
    """The compiled grammar of each constraint of a call; nothing of it waits in the engine meanwhile.

    Raises:
        InvalidRequestError: as `GrammarCompiler.compile`, of the field that the client sent.
        ApiError: 503, if the compiler's own process does not work.
    """
    specs = {prompt.grammar for prompt in call.prompts if prompt.grammar is not None}
    try:
        return {spec: await grammars.compile(spec) for spec in specs}
    except InvalidRequestError as error:
        field = call.grammar_field or error.field
        raise InvalidRequestError(error.message, field=field, hint=error.hint) from error
    except ServerError as error:
        _log.error("no grammar could be compiled: %s", error)
        raise ApiError(
            503, "Constraints cannot be compiled now.", code="no_grammars", retry_after=RETRY_SECONDS
        ) from error
