"""The protocol on raw sockets: who leaves, who is dropped, what is sent behind a request. Suite F4 abuses it."""

from __future__ import annotations

import asyncio
import random
import select
import socket

import pytest
from starlette.types import Receive, Scope, Send

from hookline.serving.limits import Limits
from hookline.serving.replies.event_stream import DROP_CONNECTION
from tests.serving.fakes import Rig
from tests.serving.wire import HEAD, PATIENCE, serving
from tests.suites.raw_cases import BYE, CL, FULL, GET, POST
from tests.suites.raw_sockets import LIMITS, App


def test_thousands_of_methods_reach_no_application() -> None:
    async def run() -> None:
        app = App()
        async with serving(app, LIMITS) as wire:
            source = random.Random(1)

            async def odd(count: int) -> None:
                for _ in range(count):
                    reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
                    writer.write(b"FOO%d / HTTP/1.1\r\n\r\n" % source.randrange(10**9))
                    assert (await reader.readline()).startswith(b"HTTP/1.1 405 ")
                    writer.close()

            await asyncio.gather(*(odd(100) for _ in range(20)))
            assert app.methods == []

    asyncio.run(run())


def test_requests_that_wait_behind_another_are_few() -> None:
    async def run() -> None:
        app = App()
        async with serving(app, LIMITS) as wire:
            waiting = b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n"
            sending = asyncio.create_task(wire.exchange(waiting + GET * 10_000))
            await asyncio.wait_for(app.waiting.wait(), PATIENCE)
            app.go_on.set()
            answer = await sending
            assert answer.statuses == [200] * 9
            assert len(app.paths) == 9

    asyncio.run(run())


def test_who_is_dropped_gets_a_reset() -> None:
    """What it does not take would lie in the kernel's buffers for minutes after a close."""

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 2**21, "more_body": True})
        scope["extensions"][DROP_CONNECTION]()
        scope["extensions"][DROP_CONNECTION]()  # of no effect any more

    async def run() -> None:
        async with serving(flood, LIMITS) as wire:
            with socket.create_connection(("127.0.0.1", wire.port)) as client:
                client.sendall(GET)
                await asyncio.to_thread(_wait_for_reset, client)

    asyncio.run(run())


def _wait_for_reset(client: socket.socket) -> None:
    poller = select.poll()
    poller.register(client, select.POLLHUP)
    assert poller.poll(1000 * PATIENCE), "the connection was not reset"


def test_a_running_answer_survives_what_its_client_sends_behind_it() -> None:
    async def run() -> None:
        app = App()
        async with serving(app, LIMITS) as wire:
            waiting = b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n"
            for behind in (b"\r\n", b"GET / HT", b"nonsense\r\n\r\n", POST + CL + b"9\r\n\r\n{"):
                app.waiting.clear()
                app.go_on.clear()
                sending = asyncio.create_task(wire.exchange(waiting, 0.1, behind))
                await asyncio.wait_for(app.waiting.wait(), PATIENCE)
                await asyncio.sleep(0.1 + 1.5 * LIMITS.header_seconds)
                app.go_on.set()
                assert (await sending).statuses == [200], behind
            assert not app.left.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("behind", [b"", GET])
def test_the_application_is_told_when_the_client_leaves(behind: bytes) -> None:
    async def run() -> None:
        app = App()
        async with serving(app, LIMITS) as wire:
            _, writer = await asyncio.open_connection("127.0.0.1", wire.port)
            writer.write(b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n" + behind)
            await asyncio.wait_for(app.waiting.wait(), PATIENCE)
            writer.transport.abort()
            await asyncio.wait_for(app.left.wait(), PATIENCE)

    asyncio.run(run())


def test_an_application_can_drop_the_connection() -> None:
    async def run() -> None:
        async with serving(App(), LIMITS) as wire:
            assert (await wire.get("/drop")).raw == b""

    asyncio.run(run())


def test_connections_are_bounded() -> None:
    async def run() -> None:
        refusals: list[int] = []
        async with serving(App(), Limits(), most_connections=3, refused=refusals.append) as wire:
            held = [await asyncio.open_connection("127.0.0.1", wire.port) for _ in range(3)]
            async with asyncio.timeout(PATIENCE):
                while len(wire.server.server_state.connections) < 3:
                    await asyncio.sleep(0.01)
            refused = await wire.exchange(0.0)
            assert refused.status == 503 and refused.headers["retry-after"] == "2"
            assert refused.json["error"]["code"] == "overloaded" and refusals == [503]
            for _, writer in held:
                writer.close()
            async with asyncio.timeout(PATIENCE):
                while (await wire.get("/")).status != 200:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_connection_serves_many_requests() -> None:
    async def run() -> None:
        async with serving(App(), LIMITS) as wire:
            answer = await wire.exchange(FULL, 0.05, GET, 0.05, FULL + BYE)
            assert answer.statuses == [200] * 4

    asyncio.run(run())


def test_what_never_becomes_a_call_is_counted_too_and_carries_the_clients_id() -> None:
    own, odd = b"GET / HTTP/1.1\r\n" + HEAD + b"X-Request-Id: mine\r\n", b"FOO / HTTP/1.1\r\n\r\n"
    cases: list[tuple[tuple[bytes | float, ...], int, str | None]] = [
        ((own + b"A: b\r\n" * 200,), 431, "mine"),
        ((own + b"Transfer-Encoding: gzip\r\n\r\n",), 400, "mine"),
        ((own.replace(b"mine", b"caf\xe9") + b"A: b\r\n" * 200,), 431, None),
        ((odd,), 405, None),
        ((own + b"\r\n", 0.1, odd), 405, None),  # the id was of the request before
    ]

    async def run() -> None:
        refusals: list[int] = []
        async with serving(App(), LIMITS, refused=refusals.append) as wire:
            for sent, status, label in cases:
                answer = (await wire.exchange(*sent)).last
                assert (answer.status, answer.headers.get("x-request-id")) == (status, label)
            assert refusals == [status for _, status, _ in cases]

    asyncio.run(run())


def test_a_body_that_is_late_is_counted_once_by_its_route() -> None:
    async def run() -> None:
        rig, refusals = Rig(), list[int]()
        async with serving(rig.app, LIMITS, refused=refusals.append) as wire:
            head = b"POST /tokenize HTTP/1.1\r\nX-Request-Id: mine\r\nContent-Type: application/json\r\n" + HEAD
            answer = await wire.exchange(head + CL + b"9\r\n\r\n{", 2 * LIMITS.body_seconds)
            assert (answer.status, answer.headers["x-request-id"]) == (408, "mine")
        assert rig.metrics.answered == [("/tokenize", "POST", 408)]
        assert refusals == []

    asyncio.run(run())
