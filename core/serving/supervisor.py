"""A server from its start to its exit code: signals, the end of running requests, the death of the engine.

start the engine -> ready -> until a signal, or the engine's end -> close
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from hookline.serving.guards import SECURITY_HEADERS
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts, Failed
from hookline.serving.protocol import BoundedProtocol, bounded_protocol
from hookline.serving.replies.calls import Calls, engine_gone, shutting_down

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds between looks at what tells nobody when it changes.
_LOOK_AGAIN = 0.05
# Seconds that answers get to write their last words, and that connections get to be closed.
_LAST_WORDS = 3
# Longer than clients keep a connection that they do not use: it is they who close it, and no request comes too late.
_KEEP_ALIVE = 75


class EngineProcess(Protocol):
    """What is needed of an `AsyncEngine`."""

    async def start(self) -> Facts: ...
    async def close(self) -> None: ...
    async def wait_dead(self) -> Failed: ...
    def kill(self) -> None: ...


class Stops:
    """The signals that ask for the end.

    Attributes:
        first, second: set when the first and the second have come.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def take(self) -> None:
        """One more has come."""
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the process's signals are taken here. Who lets the process end behind it calls `ignore`."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.take)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    @staticmethod
    def ignore() -> None:
        """From now on signals find nothing left to end, and must not make the exit code their own."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves the signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: ASGIApp, limits: Limits, most_connections: int, refused: Callable[[int], None] = BoundedProtocol.refused
) -> HttpServer:
    """A server of `app`, to be run with a socket that is bound.

    Args:
        refused: is told the status of each answer that never reaches `app`.
    """
    return HttpServer(
        uvicorn.Config(
            app,
            http=bounded_protocol(limits, most_connections, refused),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=list(SECURITY_HEADERS),
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
    )


class Supervisor:
    """Runs the HTTP side and the engine together.

    Args:
        listener: the bound socket; closed at the end.
        calls: those at work, which are ended with the server.
        say: prints a line for the operator.
    """

    def __init__(
        self,
        http: HttpServer,
        listener: socket.socket,
        engine: EngineProcess,
        lifecycle: Lifecycle,
        calls: Calls,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._http = http
        self._listener = listener
        self._engine = engine
        self._lifecycle = lifecycle
        self._calls = calls
        self._limits = calls.limits
        self._say = say

    async def run(self, stops: Stops, prepare: Callable[[Facts], str]) -> int:
        """Serves until the end, and answers with the exit code: 0 after a signal.

        Args:
            prepare: called when the engine is ready; answers with what the operator is told then.

        Raises:
            HooklineError: if the engine does not start.
        """
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        try:
            return await self._run_engine(stops, prepare, http)
        finally:
            self._http.should_exit = True
            await http

    async def _run_engine(self, stops: Stops, prepare: Callable[[Facts], str], http: asyncio.Task[None]) -> int:
        starting = asyncio.create_task(self._engine.start())
        stopping = asyncio.create_task(stops.first.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            self._lifecycle.drain()
        await _cancel(stopping, *([] if starting.done() else [starting]))
        if starting.cancelled():
            return 0
        facts = starting.result()
        try:
            told = prepare(facts)
            self._lifecycle.ready()
            self._say(told)
            return await self._until_end(stops, http)
        finally:
            await self._engine.close()

    async def _until_end(self, stops: Stops, http: asyncio.Task[None]) -> int:
        draining = asyncio.create_task(self._drain(stops))
        dying = asyncio.create_task(self._engine.wait_dead())
        hanging = asyncio.create_task(self._watch_steps())
        watched = (dying, hanging, draining)
        await asyncio.wait({*watched, http}, return_when=asyncio.FIRST_COMPLETED)
        failed = next((task.result() for task in (hanging, dying) if task.done()), None)
        if failed is None and not draining.done():
            failed = Failed("the HTTP server has ended by itself")
        if failed is not None:
            self._lifecycle.die(failed.message)
            self._say("\n".join(filter(None, [f"Error: {failed.message}", failed.hint])))
        await _cancel(*watched)
        if failed is None:
            return 0
        await self._settle()
        self._calls.end_all(engine_gone())  # such as one whose grammar is being compiled
        await self._settle()
        return failed.exit_code or 1

    async def _watch_steps(self) -> Failed:
        """Returns when the engine has hung for too long; it is killed then."""
        loop, most = asyncio.get_running_loop(), self._limits.step_seconds
        pause = min(1.0, most / 10)
        while True:
            begun = loop.time()
            await asyncio.sleep(pause)
            late = loop.time() - begun - pause > 1.0  # it is this process that stood still, and has not listened yet
            if not late and self._lifecycle.silent_seconds > most:
                self._engine.kill()
                return Failed(f"the engine has given no sign of life for {most:g} s and was ended")

    async def _drain(self, stops: Stops) -> None:
        """After the first signal lets calls end, and ends them when time is up or a second has come."""
        await stops.first.wait()
        self._lifecycle.drain()
        seconds = self._limits.drain_seconds
        if len(self._calls):
            self._say(
                f"Ending. Calls at work: {len(self._calls)}. They get {seconds:g} s; a second signal ends them at once."
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._calls) and not stops.second.is_set():
                    await asyncio.sleep(_LOOK_AGAIN)
        self._calls.end_all(shutting_down())
        await self._settle()

    async def _settle(self) -> None:
        """Waits for calls that know that they end to say so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while len(self._calls):
                    await asyncio.sleep(_LOOK_AGAIN)


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
