"""The two routes that generate: one client's call from its body to the last byte of the answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hookline.serving.api_errors import ApiError
from hookline.serving.front import Front, ServedModel
from hookline.serving.replies.answers import DONE, StreamedAnswer, WholeAnswer, event
from hookline.serving.replies.call_record import CallRecord
from hookline.serving.replies.calls import RunningCall, client_error, compile_grammars, shutting_down
from hookline.serving.replies.event_stream import ClientGone, EventStream
from hookline.serving.requests.validated import ValidatedCall

# How long a stream's head waits for the first news: what the engine refuses at once still gets a status of its own.
_HEAD_SECONDS = 1.0

Validate = Callable[[ServedModel, Mapping[str, Any], str], ValidatedCall]


class CallResponse(Response):
    """Answers one call. The work lies in the response and not in the route: so one scope holds all of it.

    Args:
        validate: makes the route's body a call.
    """

    def __init__(self, front: Front, validate: Validate, request: Request) -> None:
        self.background = None
        self.status_code = 200
        self._front = front
        self._validate = validate
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, label = self._front, self._request.headers.get("x-request-id", "")
        limits = front.config.limits
        stream = EventStream(scope, send, ping_seconds=limits.ping_seconds, reader_seconds=limits.reader_seconds)
        record = CallRecord(front.metrics, label)
        try:
            await self._answer(record, stream, scope, receive, send)
        except (ClientGone, ClientDisconnect):
            record.end("client_gone")
            stream.drop()
        except asyncio.CancelledError:
            record.fail(shutting_down())
            raise
        except Exception as error:
            told = client_error(error)
            record.fail(told)
            if not stream.opened:
                raise told from error
            await _end_with_error(stream, told)
        else:
            record.end()

    async def _answer(
        self, record: CallRecord, stream: EventStream, scope: Scope, receive: Receive, send: Send
    ) -> None:
        front, served = self._front, self._front.open_model()
        call = await self._read(served)
        running = RunningCall(call, front.config.limits.reader_values)
        async with front.calls.work(running, receive):
            grammars = await compile_grammars(call, served.grammars)
            front.open_model()  # it may have begun to end meanwhile
            front.calls.admit(running, served.facts.max_running)
            answer = (StreamedAnswer if call.stream else WholeAnswer)(call, served.context)
            record.begin(answer, served.context.eos_token_ids)
            running.submit(front.engine, grammars)
            if isinstance(answer, StreamedAnswer):
                await _stream(running, answer, record, stream, front.config.limits.ping_seconds)
            else:
                body = await _whole(running, answer, record)
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _read(self, served: ServedModel) -> ValidatedCall:
        request = self._request
        salt = str(request.scope.get("state", {}).get("cache_salt", ""))
        call = await self._front.intake.read(request, lambda body: self._validate(served, body, salt))
        label = request.headers.get("x-request-id")
        return call if label is None else dataclasses.replace(call, label=label)


async def _stream(
    running: RunningCall, answer: StreamedAnswer, record: CallRecord, stream: EventStream, ping_seconds: float
) -> None:
    news = await running.news(min(_HEAD_SECONDS, ping_seconds))
    await stream.open()
    while True:
        events = b""
        if news is not None:
            record.take(*news)
            events = answer.take(*news)
        if not running.unfinished:
            await stream.write(events + answer.end(), last=True)
            return
        if events:
            await stream.write(events)
        else:
            await stream.keep_alive()
        news = await running.news(ping_seconds)


async def _whole(running: RunningCall, answer: WholeAnswer, record: CallRecord) -> bytes:
    while running.unfinished:
        news = await running.news()
        if news is not None:
            record.take(*news)
            answer.take(*news)
    return answer.body()


async def _end_with_error(stream: EventStream, error: ApiError) -> None:
    """Ends a stream that has been opened; of a client that does not take even this nothing more is wanted."""
    if stream.closed:
        return
    try:
        await stream.write(event(error.body()) + DONE, last=True)
    except ClientGone:
        stream.drop()
