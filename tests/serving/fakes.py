"""A fake engine that plays scripts, and a client that speaks ASGI to the application, without a socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tokenizers

from hookline.config import EngineConfig
from hookline.grammar import GrammarSpec
from hookline.parsers.contract import ToolCallDelta
from hookline.scheduling.output import Load, OutputDelta, Timing, TokenLogprob
from hookline.serving.app import make_app
from hookline.serving.front import Front, ServedModel
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.limits import Limits
from hookline.serving.metrics import Metrics
from hookline.serving.probes import make_router
from hookline.serving.process.messages import Facts
from hookline.serving.requests.validated import ValidatedRequest
from hookline.serving.server_config import ServerConfig
from hookline.serving.web import make_web_router
from hookline.tokenizer import Tokenizer
from tests.conftest import CHAT_TEMPLATE, write_tokenizer

Script = Callable[[ValidatedRequest], Sequence[OutputDelta]]
PATIENCE = 10.0  # seconds after which a test that waits has failed


def delta(text: str = "", finish: str | None = None, *, index: int = 0, **fields: Any) -> OutputDelta:
    """A delta with one token a byte of its text, where `token_ids` are not given."""
    ids = fields.pop("token_ids", None)
    made = OutputDelta("r", index, text, list(text.encode()) if ids is None else list(ids), finish_reason=finish)
    if finish is not None:
        made.timing = Timing(0.01, 0.02, 0.05)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def logprob(token_id: int, value: float = -0.5, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, value, 1, top)


def make_facts(**changes: Any) -> Facts:
    """Of the model that the fake engine serves."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "plugin": "hookline-llama 0.1",
        "device": "cpu",
        "dtype": "float32",
        "vocab_size": 320,
        "max_model_len": 256,
        "block_size": 8,
        "num_blocks": 64,
        "max_running": 8,
        "max_batch_tokens": 64,
        "prefix_caching": True,
        "eos_token_ids": [258],
        "special_tokens": {},
    }
    return Facts(**(fields | changes))


class FakeAnswer:
    """One submitted prompt, in the hands of a test."""

    def __init__(self, request: ValidatedRequest, on_news: Callable[[OutputDelta], None] | None = None) -> None:
        self.request = request
        self._on_news = on_news
        self.started: float | None = None
        self.finished = False
        self.aborted = asyncio.Event()
        self._news: list[OutputDelta] = []
        self._left = request.params.n
        self._error: Exception | None = None
        self._woken = asyncio.Event()

    def feed(self, *deltas: OutputDelta) -> None:
        """Gives news, which are not joined."""
        self.started = self.started or time.monotonic()
        for found in deltas if self._on_news is not None else ():
            self._on_news(found)
        self._news += deltas
        self._woken.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._woken.set()

    async def deltas(self) -> list[OutputDelta]:
        await self._woken.wait()
        news, self._news = self._news, []
        if not news and self._error is not None:
            self.finished = True
            raise self._error
        if self._error is None:
            self._woken.clear()
        self._left -= sum(entry.finish_reason is not None for entry in news)
        self.finished = not self._left
        return news

    def abort(self) -> None:
        if not self.finished:
            self.aborted.set()


class FakeEngine:
    """Plays `script` for each request as soon as it is submitted; without one the test feeds the answers."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.is_alive = True
        self.load = Load()
        self.answers: list[FakeAnswer] = []
        self.grammars: list[bytes | None] = []
        self.streams: list[bool] = []
        self._submitted = asyncio.Event()

    def submit(
        self,
        request: ValidatedRequest,
        *,
        stream: bool = True,
        grammar: bytes | None = None,
        on_news: Callable[[OutputDelta], None] | None = None,
    ) -> FakeAnswer:
        answer = FakeAnswer(request, on_news)
        self.answers.append(answer)
        self.grammars.append(grammar)
        self.streams.append(stream)
        self._submitted.set()
        if self.script is not None:
            answer.feed(*self.script(request))
        return answer

    async def answer(self, number: int = 0) -> FakeAnswer:
        """The answer to the request `number`, once it is submitted."""
        while len(self.answers) <= number:
            self._submitted.clear()
            await asyncio.wait_for(self._submitted.wait(), PATIENCE)
        return self.answers[number]


class FakeGrammars:
    """Compiles nothing; waits for `released` first."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.released.set()
        self.asked = asyncio.Event()
        self.error: Exception | None = None

    async def compile(self, spec: object) -> bytes:
        self.asked.set()
        await self.released.wait()
        if self.error is not None:
            raise self.error
        return b"compiled"


class SpyMetrics(Metrics):
    """Remembers the ends of calls."""

    def __init__(self) -> None:
        super().__init__("hookline")
        self.arrived = 0
        self.reasons: list[str] = []
        self.ends: list[dict[str, Any]] = []
        self.answered: list[tuple[str | None, str, int]] = []

    def received(self) -> None:
        self.arrived += 1
        super().received()

    def ended(self, reason: str, **fields: Any) -> None:
        self.reasons.append(reason)
        self.ends.append(fields)
        super().ended(reason, **fields)

    def http(self, route: str | None, method: str, status: int, seconds: float) -> None:
        self.answered.append((route, method, status))
        super().http(route, method, status, seconds)


class Rig:
    """The application over a fake engine.

    Args:
        tokenizer: with a chat template, for the chat route.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        script: Script | None = None,
        *,
        limits: Limits | None = None,
        tool_format: Any = None,
        reasoning_format: Any = None,
        **facts: Any,
    ) -> None:
        self.config = ServerConfig(engine=EngineConfig(model="tiny"), limits=limits or Limits())
        self.engine = FakeEngine(script)
        self.metrics = SpyMetrics()
        self.grammars = FakeGrammars()
        self.lifecycle = Lifecycle()
        self.lifecycle.ready()
        engine: Any = self.engine
        grammars: Any = self.grammars
        self.front = Front(self.config, engine, self.lifecycle, self.metrics)
        self.front.served = ServedModel.build(
            self.config, make_facts(**facts), tokenizer, grammars, tool_format, reasoning_format
        )
        routers = [make_router(self.lifecycle, lambda: self.engine.load), make_web_router()]
        self.app = make_app(self.front, routers)

    async def get(self, path: str, method: str = "GET", **options: Any) -> Reply:
        async with self.call(path, None, method=method, **options) as reply:
            await reply.done()
        return reply

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        async with self.call(path, body, **options) as reply:
            await reply.done()
        return reply

    @asynccontextmanager
    async def call(
        self, path: str, body: Any, *, method: str = "POST", headers: Sequence[tuple[str, str]] = (), **extensions: Any
    ) -> AsyncIterator[Reply]:
        """A call that is under way; what is left of it at the end is cancelled."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = [("host", "localhost"), ("content-type", "application/json"), ("content-length", str(len(content)))]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in (*sent, *headers)],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
            "extensions": extensions,
        }
        reply = Reply(content)
        app: Any = self.app
        task: asyncio.Task[None] = asyncio.create_task(app(scope, reply.receive, reply.send))
        reply.task = task
        try:
            yield reply
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Reply:
    """What a client sees of one call."""

    def __init__(self, body: bytes) -> None:
        self.task: asyncio.Task[None] | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.writes: list[bytes] = []
        self.complete = False
        self.taking = asyncio.Event()  # a client that does not take what it is sent is one for whom this is not set
        self.taking.set()
        self._request: bytes | None = body
        self._gone = asyncio.Event()
        self._changed = asyncio.Condition()

    async def receive(self) -> dict[str, Any]:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.taking.wait()
        async with self._changed:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            else:
                self.body += message["body"]
                self.writes.append(message["body"])
                if not message.get("more_body", False):
                    self.complete = True
                    self._gone.set()
            self._changed.notify_all()

    def leave(self) -> None:
        """Closes the connection."""
        self._gone.set()

    async def until(self, condition: Callable[[Reply], bool]) -> None:
        """Waits for something of the answer."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: condition(self)), PATIENCE)

    async def done(self) -> None:
        """Waits for the end of the call; what the application raised is raised."""
        if self.task is not None:
            await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of the events so far; `[DONE]` as text."""
        parts = [part for part in self.body.decode().split("\n\n") if part.startswith("data: ")]
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


class ShoutTools:
    """A format of tool calls for tests: `CALL name {arguments};`."""

    markers: Sequence[str] = ("CALL",)

    def parser(self, tools: object) -> _ShoutParser:
        return _ShoutParser()

    def constraint(self, tools: object, name: str | None, parallel: bool) -> Any:
        return GrammarSpec("regex", "CALL .*;")


class _ShoutParser:
    def __init__(self) -> None:
        self._text = ""
        self._count = 0

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        self._text += text
        content, calls = "", []
        while (start := self._text.find("CALL ")) >= 0 and (end := self._text.find(";", start)) >= 0:
            name, arguments = self._text[start + 5 : end].split(" ", 1)
            content += self._text[:start]
            middle = len(arguments) // 2
            calls += [ToolCallDelta(self._count, name), ToolCallDelta(self._count, None, arguments[:middle])]
            calls.append(ToolCallDelta(self._count, None, arguments[middle:]))
            self._text = self._text[end + 1 :]
            self._count += 1
        if "C" not in self._text:
            content, self._text = content + self._text, ""
        return content, calls

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        text, self._text = self._text, ""
        return text, []


class StarReasoning:
    """A format of reasoning for tests, which ends at `*`."""

    markers: Sequence[str] = ("*",)
    end: str = "*"

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: object) -> bool:
        return True

    def parser(self, starts_inside: bool) -> _StarParser:
        return _StarParser(starts_inside)


class _StarParser:
    def __init__(self, inside: bool) -> None:
        self._inside = inside

    def push(self, text: str) -> tuple[str, str]:
        if not self._inside:
            return "", text
        reasoning, star, rest = text.partition("*")
        self._inside = not star
        return reasoning, rest

    def flush(self) -> tuple[str, str]:
        return "", ""


def make_tokenizer(folder: Path) -> Tokenizer:
    """The tests' tokenizer of bytes, with a chat template."""
    write_tokenizer(folder)
    built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(built, CHAT_TEMPLATE, {"eos_token": "<|endoftext|>"})
