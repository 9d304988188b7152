"""The end of a server (suite K3, and the deaths of K1 and K2): every stream is told, the exit code is right."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hookline.errors import HooklineError, ServerError
from hookline.scheduling.output import Load
from hookline.serving import probes
from hookline.serving.app import make_app
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts, Failed
from hookline.serving.supervisor import Stops, Supervisor, http_server
from tests.serving.fakes import FakeEngine, Rig, delta, make_facts
from tests.serving.wire import PATIENCE, Answer, Wire, free_listener

ENDS = (signal.SIGTERM, signal.SIGINT)
BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 5, "stream": True}).encode()


class LivingEngine(FakeEngine):
    """A fake engine that starts when it is let, and dies when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_error: Exception | None = None
        self.closed = False
        self.killed = False
        self._dead: asyncio.Future[Failed] = asyncio.get_running_loop().create_future()

    async def start(self) -> Facts:
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        return make_facts()

    async def close(self) -> None:
        self.closed = True
        self.die(Failed("closed"))

    async def wait_dead(self) -> Failed:
        return await asyncio.shield(self._dead)

    def kill(self) -> None:
        self.killed = True
        self.die(Failed("the engine process ended with signal 9"))

    def die(self, failed: Failed) -> None:
        if not self._dead.done():
            self.is_alive = False
            self._dead.set_result(failed)
            for answer in self.answers:
                answer.fail(ServerError("the engine has ended"))


class Running:
    """A server over a fake engine."""

    def __init__(self, limits: Limits, prepare: Callable[[Facts], str]) -> None:
        self.engine = LivingEngine()
        self.rig = Rig(limits=limits)
        self.front = self.rig.front
        engine: Any = self.engine
        self.front.engine = engine
        self.front.lifecycle = self.lifecycle = Lifecycle()
        self.said: list[str] = []
        self.stops = Stops()
        listener = free_listener()
        app = make_app(self.front, [probes.make_router(self.lifecycle, Load)])
        server = http_server(app, limits, 200)
        self.wire = Wire(listener.getsockname()[1], server)
        self.supervisor = Supervisor(
            server, listener, self.engine, self.lifecycle, self.front.calls, say=self.said.append
        )
        self.task = asyncio.create_task(self.supervisor.run(self.stops, prepare))

    async def code(self) -> int:
        return await asyncio.wait_for(self.task, PATIENCE)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)

    async def health(self) -> int:
        return (await self.wire.get("/health")).status

    def ask(self) -> asyncio.Task[Answer]:
        headers = ("Content-Type: application/json",)
        return asyncio.create_task(self.wire.get("/v1/completions", *headers, method="POST", body=BODY))

    async def streams(self, count: int) -> list[asyncio.Task[Answer]]:
        """So many streams, each with a token."""
        tasks = [self.ask() for _ in range(count)]
        await self.until(lambda: len(self.engine.answers) == count)
        for answer in self.engine.answers:
            answer.feed(delta("a"))
        return tasks

    def finish(self) -> None:
        for answer in self.engine.answers:
            answer.feed(delta("b", "stop"))


@asynccontextmanager
async def running(
    limits: Limits | None = None, prepare: Callable[[Facts], str] = lambda facts: "ready"
) -> AsyncIterator[Running]:
    server = Running(limits or Limits(), prepare)
    try:
        yield server
    finally:
        if not server.task.done():
            server.stops.take()
            server.stops.take()
        await asyncio.gather(server.task, return_exceptions=True)


def events(answer: Answer) -> list[Any]:
    """The data of a stream's events."""
    assert answer.status == 200
    lines = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def code_of(answer: Answer) -> str:
    """Of the error that ends a stream; "" where none does."""
    last: dict[str, Any] = events(answer)[-1]
    return str(last.get("error", {}).get("code", ""))


def test_streams_that_end_in_time_are_whole() -> None:
    async def run() -> None:
        async with running() as server:
            tasks = await server.streams(64)
            assert await server.health() == 200
            server.stops.take()
            await server.until(lambda: server.lifecycle.draining)
            assert await server.health() == 503
            refused = await server.ask()
            assert refused.status == 503 and refused.json["error"]["code"] == "shutting_down"
            assert refused.headers["retry-after"]
            server.finish()
            answers = await asyncio.gather(*tasks)
            assert {code_of(answer) for answer in answers} == {""}
            assert await server.code() == 0
            assert len(server.engine.answers) == 64
            assert server.engine.closed and len(server.front.calls) == 0
            with pytest.raises(ConnectionRefusedError):
                await server.ask()

    asyncio.run(run())


@pytest.mark.parametrize(("seconds", "signals"), [(0.0, 1), (0.3, 1), (30.0, 2)])
def test_streams_that_do_not_are_told(seconds: float, signals: int) -> None:
    async def run() -> None:
        async with running(Limits(drain_seconds=seconds)) as server:
            tasks = await server.streams(64)
            for _ in range(signals):
                server.stops.take()
            answers = await asyncio.gather(*tasks)
            assert {code_of(answer) for answer in answers} == {"shutting_down"}
            assert await server.code() == 0
            assert all(answer.aborted.is_set() for answer in server.engine.answers)
            assert server.rig.metrics.reasons == ["shutdown"] * 64

    asyncio.run(run())


def test_the_engines_death_is_told_and_gives_its_code() -> None:
    async def run() -> None:
        async with running() as server:
            tasks = await server.streams(8)
            waiting = server.ask()  # and one that has not begun
            await server.until(lambda: len(server.engine.answers) == 9)
            server.engine.die(Failed("out of memory", "Give it more.", 6))
            await server.until(lambda: server.lifecycle.state == "dead")
            answers = await asyncio.gather(*tasks)
            assert {code_of(answer) for answer in answers} == {"engine_dead"}
            assert (await waiting).status == 503
            assert await server.code() == 6
            assert server.said[-1] == "Error: out of memory\nGive it more."

    asyncio.run(run())


def test_an_engine_that_hangs_is_killed() -> None:
    async def run() -> None:
        async with running(Limits(step_seconds=0.5)) as server:
            tasks = await server.streams(4)
            assert [code_of(answer) for answer in await asyncio.gather(*tasks)] == ["engine_dead"] * 4
            assert server.engine.killed
            assert await server.code() == 1
            assert "no sign of life for 0.5 s" in server.said[-1]

    asyncio.run(run())


def test_an_engine_that_lives_is_not_killed() -> None:
    async def run() -> None:
        async with running(Limits(step_seconds=0.3)) as server:
            for _ in range(20):
                await asyncio.sleep(0.05)
                server.lifecycle.heard()
            assert not server.engine.killed
            assert await server.health() == 200

    asyncio.run(run())


def test_the_start_is_shown_and_can_be_given_up() -> None:
    async def run() -> None:
        async with running() as server:
            server.engine.may_start.clear()
            server.front.served = None
            server.lifecycle.stage("loading", 1, 4)
            assert await server.health() == 503
            shown = (await server.wire.get("/startup")).json
            assert shown["stage"] == "loading" and shown["progress"] == 0.25
            refused = await server.ask()
            assert refused.status == 503 and refused.json["error"]["code"] == "loading"
            server.stops.take()
            assert await server.code() == 0
            assert server.said == []

    asyncio.run(run())


@pytest.mark.parametrize("at", ["start", "prepare"])
def test_a_start_that_fails_is_raised(at: str) -> None:
    def prepare(facts: Facts) -> str:
        raise HooklineError("no such parser")

    async def run() -> None:
        async with running(prepare=prepare) as server:
            if at == "start":
                server.engine.start_error = HooklineError("no room")
            with pytest.raises(HooklineError, match="no room" if at == "start" else "no such parser"):
                await server.code()
            assert at == "start" or server.engine.closed

    asyncio.run(run())


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that reached nobody else: whoever should have taken them, or left them aside, did not."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda got, _: found.append(got)) for number in ENDS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in ENDS]


def test_signals_are_counted_while_somebody_listens(heard: list[int]) -> None:
    async def run() -> None:
        stops = Stops()
        with stops.listening():
            assert not stops.first.is_set()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stops.first.wait(), PATIENCE)
            assert not stops.second.is_set()
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(stops.second.wait(), PATIENCE)
        # What was there before is gone: hence `ignore`.
        assert handlers() == [signal.SIG_DFL, signal.default_int_handler]

    asyncio.run(run())
    assert heard == []


def test_behind_the_end_signals_end_nothing(heard: list[int]) -> None:
    async def run() -> None:
        stops = Stops()
        with stops.listening():
            pass
        stops.ignore()
        assert handlers() == [signal.SIG_IGN] * 2
        for number in ENDS:
            signal.raise_signal(number)
        assert not stops.first.is_set()

    loops = http_server(make_app(Rig().front, []), Limits(), 1).config.get_loop_factory()
    with asyncio.Runner(loop_factory=loops) as runner:  # as `server.serve` has it; it sets handlers itself
        runner.run(run())
    assert handlers() == [signal.SIG_IGN] * 2
    for number in ENDS:
        signal.raise_signal(number)
    assert heard == []
