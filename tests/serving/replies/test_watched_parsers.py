"""A plugin's parser that raises, is slow or answers nonsense ends its own request, and the log names the plugin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hookline.errors import PluginError
from hookline.serving.replies import watched_parsers
from hookline.serving.replies.watched_parsers import WatchedReasoning, WatchedTools
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import PATIENCE, Reply, Rig, ShoutTools, StarReasoning, delta, make_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
PLUGIN = "hookline-llama 0.1"  # as `make_facts` has it


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def fail(*arguments: object) -> Any:
    raise KeyError("secret")


def leave(*arguments: object) -> Any:
    raise SystemExit(3)


class Broken:
    """A format, and its parser, whose calls do what the test says; the others give nothing."""

    markers: Sequence[str] = ("!",)
    end = "!"

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self._calls = {"push": lambda text: ("", ""), "flush": lambda: ("", ""), "parser": lambda _: self} | calls
        self.push, self.flush, self.parser = (self._calls[name] for name in ("push", "flush", "parser"))

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: object) -> bool:
        return True

    def constraint(self, tools: object, name: str | None, parallel: bool) -> None:
        return None


def hello(request: object) -> list[Any]:
    return [delta("Hello", "stop")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["tools", "reasoning"])
@pytest.mark.parametrize("call", ["parser", "push", "flush"])
@pytest.mark.parametrize("fault", [fail, leave, lambda *arguments: None], ids=["raises", "exits", "gives nothing"])
def test_a_parser_that_fails_ends_its_request(
    tokenizer: Tokenizer, stream: bool, kind: str, call: str, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(**{call: fault})
    formats: dict[str, Any] = {"tool_format" if kind == "tools" else "reasoning_format": broken}
    rig = Rig(tokenizer, hello, **formats)
    body = CHAT | {"stream": stream} | (TOOLS if kind == "tools" else {})
    reply = asyncio.run(rig.post("/v1/chat/completions", body))
    if stream and call != "parser":  # its head was sent before there was anything to parse
        assert reply.status == 200 and reply.events[-1] == "[DONE]"
        error = reply.events[-2]["error"]
    else:
        assert reply.status == 500
        error = reply.error
    assert error["type"] == "server_error" and b"secret" not in reply.body
    assert rig.metrics.reasons == ["engine_fault"]
    assert len(rig.front.calls) == 0
    assert error["code"] in caplog.text and PLUGIN in caplog.text and "Broken" in caplog.text


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *(("tools", call) for call in ("push", "parser", "constraint")),
        *(("reasoning", call) for call in ("push", "parser", "starts_inside")),
    ],
)
@pytest.mark.parametrize("fault", [fail, leave], ids=["raises", "exits"])
def test_one_that_fails_at_the_door_ends_its_request(
    tokenizer: Tokenizer, kind: str, call: str, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a message goes on, where a prompt may open a thought, and where a call is forced."""
    broken = Broken(**{call: fault} if call in ("push", "parser") else {})
    if call in ("starts_inside", "constraint"):
        setattr(broken, call, fault)
    formats: dict[str, Any] = {"tool_format" if kind == "tools" else "reasoning_format": broken}
    body: dict[str, Any] = CHAT | (TOOLS if kind == "tools" else {})
    if call in ("push", "parser"):
        body |= {"continue_final_message": True, "messages": [{"role": "assistant", "content": "so"}]}
    elif call == "constraint":
        body["tool_choice"] = "required"
    reply = asyncio.run(Rig(tokenizer, hello, **formats).post("/v1/chat/completions", body))
    assert reply.status == 500 and reply.error["type"] == "server_error" and b"secret" not in reply.body
    assert PLUGIN in caplog.text and "Broken" in caplog.text


def test_a_long_answer_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_parsers, "MOST_PROCESSOR_SECONDS", 0.02)
    parser = WatchedReasoning(Broken(push=spin), PLUGIN).parser(False)
    parser.push("a" * 10_000)
    with pytest.raises(PluginError, match="it may take"):
        parser.push("a")


def test_others_go_on(tokenizer: Tokenizer) -> None:
    """A stream whose parser fails in its midst, between two pieces of another."""

    def push(text: str) -> tuple[str, str]:
        return fail() if "!" in text else ("", text)

    async def run() -> tuple[Reply, Reply]:
        rig = Rig(tokenizer, reasoning_format=Broken(push=push))
        stream = CHAT | {"stream": True}
        async with (
            rig.call("/v1/chat/completions", stream) as good,
            rig.call("/v1/chat/completions", stream) as bad,
        ):
            first, second = await rig.engine.answer(0), await rig.engine.answer(1)
            for answer in (first, second):
                answer.feed(delta("a"))
            await bad.until(lambda reply: b'"a"' in reply.body)
            second.feed(delta("!"))
            await bad.done()
            await asyncio.wait_for(second.aborted.wait(), PATIENCE)
            first.feed(delta("b", "stop"))
            await good.done()
        assert sorted(rig.metrics.reasons) == ["engine_fault", "stop"]
        return good, bad

    good, bad = asyncio.run(run())
    assert bad.events[-2]["error"]["type"] == "server_error" and bad.events[-1] == "[DONE]"
    texts = [event["choices"][0]["delta"].get("content", "") for event in good.events[:-1]]
    assert "".join(texts) == "ab"


def spin(text: str) -> tuple[str, str]:
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        continue
    return "", text


def doze(text: str) -> tuple[str, str]:
    time.sleep(0.03)
    return "", text


@pytest.mark.parametrize(
    ("push", "most"), [(spin, "MOST_PROCESSOR_SECONDS"), (doze, "MOST_SECONDS")], ids=["busy", "asleep"]
)
def test_a_slow_parser_ends_its_request(
    tokenizer: Tokenizer, push: Any, most: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tokenizer, hello, reasoning_format=Broken(push=push))
    assert asyncio.run(rig.post("/v1/chat/completions", CHAT)).status == 200
    monkeypatch.setattr(watched_parsers, most, 0.02)
    reply = asyncio.run(rig.post("/v1/chat/completions", CHAT))
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert PLUGIN in caplog.text and "for one piece of an answer" in caplog.text


def test_a_sound_parser_gives_what_it_gives() -> None:
    tools, reasoning = WatchedTools(ShoutTools(), PLUGIN), WatchedReasoning(StarReasoning(), PLUGIN)
    assert (tools.markers, reasoning.markers, reasoning.end) == (("CALL",), ("*",), "*")
    assert reasoning.starts_inside([], lambda text: None) and tools.constraint([], None, True) is not None
    watched, plain = tools.parser([]), ShoutTools().parser([])
    text = "a CALL f {}; b"
    assert watched.push(text) == plain.push(text) and watched.flush() == plain.flush()
    assert reasoning.parser(True).push("x*y") == ("x", "y")
    broken: Any = Broken(push=fail)
    with pytest.raises(PluginError, match="KeyError"):
        WatchedTools(broken, PLUGIN).parser([]).push("a")
