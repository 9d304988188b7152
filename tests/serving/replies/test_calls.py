"""Calls at work: who is let in, what ends them, and that each ends once with nothing left behind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from hookline.errors import InvalidRequestError, ServerError
from hookline.scheduling.output import OutputDelta, Timing
from hookline.serving.limits import Limits
from hookline.serving.replies import calls
from hookline.serving.replies.calls import shutting_down
from hookline.serving.requests.validated import ValidatedRequest
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import PATIENCE, Reply, Rig, delta, make_tokenizer

BODY = {"model": "tiny", "prompt": "hello"}
JSON_BODY = BODY | {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def hello(request: ValidatedRequest) -> list[OutputDelta]:
    return [delta("Hello", "stop", index=index, stop_reason=258) for index in range(request.params.n)]


def post(rig: Rig, body: Any, path: str = "/v1/completions") -> Reply:
    return asyncio.run(rig.post(path, body))


def test_a_whole_answer_is_not_asked_for_piece_by_piece(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello)
    reply = post(rig, BODY)
    assert reply.json["choices"][0]["text"] == "Hello"
    assert rig.engine.streams == [False]
    assert len(rig.front.calls) == 0


def test_several_prompts_answer_in_their_order_whoever_is_first(tokenizer: Tokenizer) -> None:
    async def run() -> Reply:
        rig = Rig(tokenizer)
        async with rig.call("/v1/completions", BODY | {"prompt": ["a", "b", "c"], "n": 2}) as reply:
            await rig.engine.answer(2)
            for number in (2, 0, 1):
                parts = [delta(f"{number}{index}", "stop", index=index) for index in (1, 0)]
                rig.engine.answers[number].feed(*parts)
            await reply.done()
        assert rig.metrics.reasons == ["stop"]
        return reply

    choices = asyncio.run(run()).json["choices"]
    assert [choice["text"] for choice in choices] == ["00", "01", "10", "11", "20", "21"]
    assert [choice["index"] for choice in choices] == list(range(6))


def test_one_refused_prompt_of_several_ends_the_others(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Rig, Reply]:
        rig = Rig(tokenizer)
        async with rig.call("/v1/completions", BODY | {"prompt": ["a", "b"]}) as reply:
            await rig.engine.answer(1)
            rig.engine.answers[1].fail(InvalidRequestError("no", field="prompt"))
            await reply.done()
        assert rig.engine.answers[0].aborted.is_set()
        return rig, reply

    rig, reply = asyncio.run(run())
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert rig.metrics.reasons == ["invalid"]


def test_beyond_the_queue_calls_are_refused_until_there_is_room(tokenizer: Tokenizer) -> None:
    async def run() -> list[int]:
        rig = Rig(tokenizer, limits=Limits(waiting=1), max_running=2)
        async with rig.call("/v1/completions", BODY | {"n": 2}) as first, rig.call("/v1/completions", BODY) as second:
            await rig.engine.answer(1)
            refused = await rig.post("/v1/completions", BODY)
            rig.engine.answers[1].feed(*hello(rig.engine.answers[1].request))
            await second.done()
            async with rig.call("/v1/completions", BODY) as third:
                (await rig.engine.answer(2)).feed(delta("a", "stop"))
                await third.done()
            first.leave()
            await first.done()
        assert refused.headers["retry-after"].isdigit()
        assert rig.metrics.reasons == ["overloaded", "eos", "stop", "client_gone"]
        return [refused.status, second.status, third.status]

    assert asyncio.run(run()) == [429, 200, 200]


def test_who_does_not_take_what_the_engine_has_done_keeps_nobody_out(tokenizer: Tokenizer) -> None:
    async def run() -> list[int]:
        rig = Rig(tokenizer, limits=Limits(waiting=0, reader_seconds=60.0), max_running=2)
        body, slow = BODY | {"n": 2}, BODY | {"n": 2, "stream": True}
        async with rig.call("/v1/completions", slow) as first:
            answer = await rig.engine.answer(0)
            first.taking.clear()
            refused = await rig.post("/v1/completions", BODY)
            answer.feed(delta("Hello", "stop", index=0))
            async with rig.call("/v1/completions", BODY) as second:  # in the place of the half that has ended
                (await rig.engine.answer(1)).feed(delta("a", "stop"))
                await second.done()
            answer.feed(delta("Hello", "stop", index=1))
            async with rig.call("/v1/completions", body) as third:
                (await rig.engine.answer(2)).feed(delta("a", "stop"), delta("b", "stop", index=1))
                await third.done()
            first.leave()
            await first.done()
        assert rig.front.calls._open == rig.front.calls._unread_answers == 0
        return [refused.status, second.status, third.status]

    assert asyncio.run(run()) == [429, 200, 200]


def test_of_many_who_read_nothing_those_who_came_first_are_dropped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(seconds: float) -> list[bool]:
        monkeypatch.setattr(calls, "_READ_SECONDS", seconds)
        rig = Rig(tokenizer, limits=Limits(waiting=0, reader_seconds=60.0), max_running=2)
        async with AsyncExitStack() as stack:
            slow = list[Reply]()
            for number in range(4):
                slow.append(await stack.enter_async_context(rig.call("/v1/completions", BODY | {"stream": True})))
                answer = await rig.engine.answer(number)
                slow[-1].taking.clear()
                answer.feed(delta("Hello", "stop"))
                await asyncio.sleep(0.01)
            ended = [reply.task.done() for reply in slow]
            for reply in slow:
                reply.leave()
                await reply.done()
        assert rig.front.calls._open == rig.front.calls._unread_answers == 0
        return ended

    assert asyncio.run(run(0.0)) == [True, True, False, False]
    assert asyncio.run(run(60.0)) == [False] * 4


def test_a_call_that_could_never_be_let_in_is_told_so(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello, limits=Limits(waiting=0), max_running=2)
    assert post(rig, BODY | {"n": 3}).status == 400
    assert post(rig, BODY | {"n": 2}).status == 200


def test_grammars_are_compiled_before_anything_is_submitted(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello)
    assert post(rig, JSON_BODY).status == 200
    assert rig.engine.grammars == [b"compiled"]


def test_who_leaves_while_a_grammar_is_compiled_submits_nothing(tokenizer: Tokenizer) -> None:
    async def run() -> Rig:
        rig = Rig(tokenizer)
        rig.grammars.released.clear()
        async with rig.call("/v1/completions", JSON_BODY) as reply:
            await asyncio.wait_for(rig.grammars.asked.wait(), PATIENCE)
            reply.leave()
            await reply.done()
        return rig

    rig = asyncio.run(run())
    assert rig.engine.answers == []
    assert rig.metrics.reasons == ["client_gone"]


def test_a_grammar_that_does_not_compile_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.grammars.error = InvalidRequestError("too complex", field="response_format")
    for fields, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"guided_json": {}}, "guided_json"),
    ):
        reply = post(rig, BODY | fields)
        assert (reply.status, reply.error["param"]) == (400, param)
    assert rig.metrics.reasons == ["invalid"] * 3


def test_a_compiler_that_does_not_work_is_not_the_clients_fault(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.grammars.error = ServerError("no process")
    reply = post(rig, JSON_BODY)
    assert (reply.status, reply.error["code"]) == (503, "no_grammars")
    assert rig.engine.answers == []


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_a_waiting_request_ends_it(tokenizer: Tokenizer, stream: bool) -> None:
    async def run() -> Rig:
        rig = Rig(tokenizer)
        async with rig.call("/v1/completions", BODY | {"stream": stream}) as reply:
            answer = await rig.engine.answer()
            reply.leave()
            await asyncio.wait_for(answer.aborted.wait(), PATIENCE)
            await reply.done()
        return rig

    assert asyncio.run(run()).metrics.reasons == ["client_gone"]


def test_a_request_that_never_starts_ends_with_503(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, limits=Limits(queue_seconds=0.05))
    reply = post(rig, BODY)
    assert (reply.status, reply.error["code"]) == (503, "queue_deadline")
    assert reply.headers["retry-after"].isdigit()
    assert rig.engine.answers[0].aborted.is_set()
    assert rig.metrics.reasons == ["deadline"]


def test_a_request_that_runs_too_long_ends_though_it_was_not_in_the_queue_too_long(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Rig, Reply]:
        rig = Rig(tokenizer, limits=Limits(queue_seconds=0.05, request_seconds=0.2))
        async with rig.call("/v1/completions", BODY | {"stream": True}) as reply:
            (await rig.engine.answer()).feed(delta("a"))
            await reply.done()
        return rig, reply

    rig, reply = asyncio.run(run())
    assert reply.events[0]["choices"][0]["text"] == "a"
    assert reply.events[-2]["error"]["code"] == "deadline"
    assert reply.events[-1] == "[DONE]"
    assert rig.engine.answers[0].aborted.is_set()
    assert rig.metrics.reasons == ["deadline"]


def test_a_shutdown_ends_all_calls_with_an_error(tokenizer: Tokenizer) -> None:
    async def run() -> tuple[Rig, Reply, Reply]:
        rig = Rig(tokenizer)
        stream = BODY | {"stream": True}
        async with rig.call("/v1/completions", stream) as streaming, rig.call("/v1/completions", BODY) as waiting:
            (await rig.engine.answer(0)).feed(delta("a"))
            await streaming.until(lambda reply: b'"a"' in reply.body)
            await rig.engine.answer(1)
            assert len(rig.front.calls) == 2
            rig.front.calls.end_all(shutting_down())
            await streaming.done()
            await waiting.done()
        return rig, streaming, waiting

    rig, streaming, waiting = asyncio.run(run())
    assert streaming.events[-2]["error"]["code"] == "shutting_down"
    assert (waiting.status, waiting.error["code"]) == (503, "shutting_down")
    assert rig.metrics.reasons == ["shutdown", "shutdown"]
    assert len(rig.front.calls) == 0


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ("drain", "shutting_down", "shutdown"),
        ("die", "engine_dead", "engine_fault"),
        ("load", "loading", "overloaded"),
    ],
)
def test_a_server_that_does_not_serve_says_503(tokenizer: Tokenizer, change: str, code: str, reason: str) -> None:
    rig = Rig(tokenizer, hello)
    if change == "drain":
        rig.lifecycle.drain()
    elif change == "die":
        rig.engine.is_alive = False
    else:
        rig.front.served = None
    reply = post(rig, BODY)
    assert (reply.status, reply.error["code"]) == (503, code)
    assert reply.headers["retry-after"].isdigit()
    assert rig.engine.answers == []
    assert rig.metrics.reasons == [reason]


def test_the_end_is_told_with_the_engines_times(tokenizer: Tokenizer) -> None:
    def play(request: ValidatedRequest) -> list[OutputDelta]:
        last = delta("abc", "length")
        last.timing = Timing(0.5, 2.0, 5.0)
        return [last]

    rig = Rig(tokenizer, play)
    post(rig, BODY | {"max_tokens": 3})
    (end,) = rig.metrics.ends
    assert rig.metrics.reasons == ["length"]
    assert (end["queued"], end["prefill"], end["decode"]) == (0.5, 1.5, 3.0)
    assert (end["prompt_tokens"], end["generated"], end["n"], end["max_tokens"]) == (5, 3, 1, 3)


def test_the_log_has_the_clients_id_wherever_it_came(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hookline.serving.replies.call_record")
    rig = Rig(tokenizer, hello)
    post(rig, BODY | {"request_id": "of the body"})
    asyncio.run(rig.post("/v1/completions", BODY | {"request_id": "b"}, headers=[("x-request-id", "of the head")]))
    assert ["'of the body'" in caplog.messages[0], "'of the head'" in caplog.messages[1]] == [True, True]


def test_every_call_that_came_has_ended_once(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello)
    bodies: list[Any] = [
        BODY,
        b"{",
        [],
        {"prompt": 1},
        BODY | {"model": "x"},
        BODY | {"n": 99},
        BODY | {"stream": True},
    ]
    statuses = [post(rig, body).status for body in bodies]
    assert statuses == [200, 400, 400, 400, 404, 400, 200]
    assert rig.metrics.arrived == len(bodies)
    assert rig.metrics.reasons == ["eos", *["invalid"] * 5, "eos"]
