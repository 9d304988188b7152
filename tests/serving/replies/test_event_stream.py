"""Server-sent events as they stand on the wire, and clients who leave or take nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import InvalidRequestError, ServerError
from hookline.scheduling.output import OutputDelta
from hookline.serving.limits import Limits
from hookline.serving.replies.event_stream import DROP_CONNECTION
from hookline.serving.requests.validated import ValidatedRequest
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import FakeAnswer, Reply, Rig, ShoutTools, delta, make_tokenizer

BODY = {"model": "tiny", "prompt": "hello", "stream": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def hello(request: ValidatedRequest) -> list[OutputDelta]:
    return [delta("Hel"), delta("lo", "stop", stop_reason=258)]


def has(text: bytes) -> Callable[[Reply], bool]:
    return lambda reply: text in reply.body


async def ended(answer: FakeAnswer) -> None:
    await asyncio.wait_for(answer.aborted.wait(), 5)


def test_the_wire_is_that_of_server_sent_events(tokenizer: Tokenizer) -> None:
    reply = asyncio.run(Rig(tokenizer, hello).post("/v1/chat/completions", CHAT))
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in reply.headers
    assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert reply.body.count(b"[DONE]") == 1
    assert all(part.startswith(b"data: ") for part in reply.body.split(b"\n\n")[:-1])
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in reply.events[:-1]) == "Hello"
    assert reply.complete


def test_what_came_meanwhile_shares_a_write(tokenizer: Tokenizer) -> None:
    async def run() -> Reply:
        rig = Rig(tokenizer)
        async with rig.call("/v1/completions", BODY | {"n": 2}) as reply:
            answer = await rig.engine.answer()
            answer.feed(delta("a", index=0), delta("b", index=1))
            await reply.until(has(b'"b"'))
            answer.feed(delta("", "stop", index=0), delta("", "length", index=1))
            await reply.done()
        return reply

    reply = asyncio.run(run())
    assert len(reply.writes) == 2
    reasons = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in reply.events[:-1]]
    assert reasons == [(0, None), (1, None), (0, "stop"), (1, "length")]


def test_comments_keep_a_silent_stream_alive_even_before_the_first_token(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Reply, bytes]:
        rig = Rig(tokenizer, limits=Limits(ping_seconds=0.02))
        async with rig.call("/v1/completions", BODY) as reply:
            answer = await rig.engine.answer()
            await reply.until(lambda reply: reply.body.count(b": ") >= 2)
            silent = reply.body
            answer.feed(delta("x", "stop"))
            await reply.done()
        return reply, silent

    reply, silent = asyncio.run(run())
    assert all(part.startswith(b":") for part in silent.split(b"\n\n")[:-1])
    assert reply.events[-1] == "[DONE]"


def test_comments_come_too_while_nothing_of_the_news_is_shown(tokenizer: Tokenizer) -> None:
    async def run() -> Reply:
        rig = Rig(tokenizer, limits=Limits(ping_seconds=0.02))
        async with rig.call("/v1/completions", BODY) as reply:
            answer = await rig.engine.answer()
            while b": " not in reply.body:
                answer.feed(delta("", token_ids=[7]))
                await asyncio.sleep(0)
            answer.feed(delta("x", "stop"))
            await reply.done()
        return reply

    assert asyncio.run(run()).events[-1] == "[DONE]"


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_who_leaves_ends_the_request_at_once(tokenizer: Tokenizer, tokens: int) -> None:
    async def run() -> Rig:
        rig = Rig(tokenizer, limits=Limits(ping_seconds=0.02))
        async with rig.call("/v1/completions", BODY) as reply:
            answer = await rig.engine.answer()
            for number in range(tokens):
                answer.feed(delta(f"<{number}>"))
                await reply.until(has(f"<{number}>".encode()))
            reply.leave()
            await ended(answer)
            await reply.done()
            assert not reply.complete
        return rig

    rig = asyncio.run(run())
    assert rig.metrics.reasons == ["client_gone"]
    assert len(rig.front.calls) == 0


def test_who_takes_nothing_is_dropped(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Rig, list[str]]:
        rig = Rig(tokenizer, limits=Limits(reader_seconds=0.05))
        dropped: list[str] = []
        extensions: dict[str, Any] = {DROP_CONNECTION: lambda: dropped.append("yes")}
        async with rig.call("/v1/completions", BODY, **extensions) as reply:
            answer = await rig.engine.answer()
            answer.feed(delta("a"))
            await reply.until(has(b'"a"'))
            reply.taking.clear()
            answer.feed(delta("b"))
            await ended(answer)
            await reply.done()
        return rig, dropped

    rig, dropped = asyncio.run(run())
    assert rig.metrics.reasons == ["client_gone"]
    assert dropped == ["yes"]


@pytest.mark.parametrize("prompts", [1, 2])
def test_who_takes_too_little_is_dropped(tokenizer: Tokenizer, prompts: int) -> None:
    """What waits is counted over all prompts of the call; what has been taken does not count any more."""

    async def run() -> tuple[Rig, list[str]]:
        rig = Rig(tokenizer, limits=Limits(reader_seconds=60.0, reader_values=200))
        dropped: list[str] = []
        extensions: dict[str, Any] = {DROP_CONNECTION: lambda: dropped.append("yes")}
        async with rig.call("/v1/completions", BODY | {"prompt": ["ab"] * prompts}, **extensions) as reply:
            answers = [await rig.engine.answer(number) for number in range(prompts)]
            for number in range(9):
                for name, answer in zip("xy", answers, strict=False):
                    answer.feed(delta(f"{number}{name}" * 45))
                    await reply.until(has(f"{number}{name}{number}".encode()))
            reply.taking.clear()
            for number in range(2 * prompts + 1):  # the first is taken, and lies in the connection
                answers[number % prompts].feed(delta("b" * (90 // prompts)))
                await asyncio.sleep(0.01)
                assert not answers[0].aborted.is_set()
            answers[-1].feed(delta("c" * 90))
            for answer in answers:
                await ended(answer)
            await reply.done()
        return rig, dropped

    rig, dropped = asyncio.run(run())
    assert rig.metrics.reasons == ["client_gone"]
    assert dropped == ["yes"]


def test_who_reads_at_once_is_not_behind(tokenizer: Tokenizer) -> None:
    """However much comes in one go."""

    async def run() -> Rig:
        rig = Rig(tokenizer, limits=Limits(reader_values=200))
        async with rig.call("/v1/completions", BODY) as reply:
            answer = await rig.engine.answer()
            for _ in range(3):
                await asyncio.sleep(0.01)  # it waits for news
                answer.feed(*(delta("a" * 90) for _ in range(9)))
            answer.feed(delta("b", "stop"))
            await reply.done()
        return rig

    assert asyncio.run(run()).metrics.reasons == ["stop"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(InvalidRequestError("no", field="seed"), 400, "invalid_value"), (ServerError("dead"), 503, "engine_dead")],
)
def test_an_error_before_the_first_token_has_a_status_of_its_own(
    tokenizer: Tokenizer, error: Exception, status: int, code: str
) -> None:
    async def run() -> Reply:
        rig = Rig(tokenizer)
        async with rig.call("/v1/completions", BODY) as reply:
            (await rig.engine.answer()).fail(error)
            await reply.done()
        return reply

    reply = asyncio.run(run())
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/json"


def test_an_error_within_the_stream_is_an_event_before_the_end(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Rig, Reply]:
        rig = Rig(tokenizer)
        async with rig.call("/v1/chat/completions", CHAT) as reply:
            answer = await rig.engine.answer()
            answer.feed(delta("Hel"))
            await reply.until(has(b"Hel"))
            answer.fail(ServerError("dead"))
            await reply.done()
        return rig, reply

    rig, reply = asyncio.run(run())
    assert reply.complete
    assert reply.events[-1] == "[DONE]"
    assert reply.events[-2]["error"]["code"] == "engine_dead"
    assert set(reply.events[-2]["error"]) == {"message", "type", "param", "code"}
    assert rig.metrics.reasons == ["engine_fault"]


@pytest.mark.parametrize(("finish", "text"), [("error", "secret /path"), ("abort", None)])
def test_a_continuation_that_the_engine_ended_is_an_error(tokenizer: Tokenizer, finish: str, text: str | None) -> None:
    async def run() -> tuple[Rig, Reply]:
        rig = Rig(tokenizer)
        async with rig.call("/v1/completions", BODY | {"n": 2}) as reply:
            answer = await rig.engine.answer()
            answer.feed(delta("Hel"))
            await reply.until(has(b"Hel"))
            answer.feed(delta("", finish, error=text))
            await reply.done()
        assert answer.aborted.is_set()  # the other continuation is not left behind
        return rig, reply

    rig, reply = asyncio.run(run())
    assert "error" in reply.events[-2]
    assert b"secret" not in reply.body
    assert rig.metrics.reasons == ["engine_fault"]


class _BrokenTools(ShoutTools):
    def parser(self, tools: object) -> Any:
        raise RuntimeError("plugin fault")


def test_a_parser_that_fails_fails_only_its_call(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Rig, Reply, Reply]:
        rig = Rig(tokenizer, hello, tool_format=_BrokenTools())
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        broken = await rig.post("/v1/chat/completions", CHAT | {"tools": tools})
        return rig, broken, await rig.post("/v1/chat/completions", CHAT)

    rig, broken, fine = asyncio.run(run())
    assert (broken.status, fine.status) == (500, 200)
    assert b"plugin fault" not in broken.body
    assert rig.metrics.reasons == ["engine_fault", "eos"]


def test_a_client_that_leaves_while_the_error_is_told_is_no_fault(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def run() -> Rig:
        rig = Rig(tokenizer, limits=Limits(reader_seconds=0.05))
        async with rig.call("/v1/completions", BODY) as reply:
            answer = await rig.engine.answer()
            answer.feed(delta("a"))
            await reply.until(has(b'"a"'))
            reply.taking.clear()
            answer.fail(ServerError("dead"))
            await reply.done()
        return rig

    assert asyncio.run(run()).metrics.reasons == ["engine_fault"]
