"""Raw sockets against the server (suite F4): whatever a stranger sends costs little, is answered, and hurts nobody."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hookline.serving.accounting import error_response
from hookline.serving.api_errors import ApiError
from hookline.serving.event_stream import DROP_CONNECTION
from hookline.serving.guards import read_json
from hookline.serving.limits import Limits
from tests.serving.wire import HEAD, PATIENCE, Wire, chunk, memory, serving

LIMITS = Limits(header_seconds=0.5, body_seconds=0.5, reader_seconds=0.5, body_bytes=2**20)
CL, TE = b"Content-Length: ", b"Transfer-Encoding: "
POST = b"POST /json HTTP/1.1\r\n" + HEAD
CHUNKED = POST + TE + b"chunked\r\n\r\n"
FULL = POST + CL + b"7\r\n\r\n" + b'{"a":1}'
GET = b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n"
BYE = b"GET / HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n"


class App:
    """`/json` reads a body, `/wait` answers when told to, `/refuse` answers without a look, all else is `ok`."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.paths: list[str] = []
        self.left = asyncio.Event()
        self.waiting = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.methods.append(scope["method"])
        self.paths.append(scope["path"])
        status, body = 200, b"ok"
        try:
            if scope["path"] == "/json":
                body = str(len(await read_json(Request(scope, receive), LIMITS))).encode()
            elif scope["path"] == "/wait":
                body = await self._wait(receive)
            elif scope["path"] == "/drop":
                scope["extensions"][DROP_CONNECTION]()
            elif scope["path"] == "/refuse":
                status = 401
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except ClientDisconnect:
            self.left.set()
            return
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]}
        )
        await send({"type": "http.response.body", "body": body})

    async def _wait(self, receive: Receive) -> bytes:
        while (await receive()).get("more_body"):
            continue
        self.waiting.set()
        leaving, going = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.set()
        for task in (leaving, going):
            task.cancel()
        return b"ok"


class Case(NamedTuple):
    """What is sent, and the status of the last answer; 0 where the connection is closed without one."""

    name: str
    parts: tuple[bytes | float, ...]
    status: int


def head(*lines: bytes, path: bytes = b"/") -> bytes:
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""])


BAD_LINES = {
    "no version": b"GET /\r\n\r\n",
    "0.9": b"GET / HTTP/0.9\r\n" + HEAD + b"\r\n",
    "2.0": b"GET / HTTP/2.0\r\n" + HEAD + b"\r\n",
    "9.9": b"GET / HTTP/9.9\r\n" + HEAD + b"\r\n",
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "NUL in the path": b"GET /a\0b HTTP/1.1\r\n" + HEAD + b"\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HEAD + b"\r\n",
    "NUL in a header": head(b"A: b\0c"),
    "NUL first": b"\0\0\0\0\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 40,
    "folded header": head(b"A: b\r\n c"),
    "bare line feeds": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "space before the colon": head(b"A : b"),
    "empty header name": head(b": b"),
    "header without colon": head(b"nothing"),
    "control in a header": head(b"A: \x01"),
    "no target": b"GET HTTP/1.1\r\n" + HEAD + b"\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"\r\n",
    "absolute target": b"GET http://localhost/ HTTP/1.1\r\n" + HEAD + b"\r\n",
    "tunnel": b"CONNECT localhost:80 HTTP/1.1\r\n" + HEAD + b"\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": head(b"Host: localhost"),
}
BAD_BODIES = {
    "length and chunks": POST + CL + b"3\r\n" + TE + b"chunked\r\n\r\n" + chunk(b"abc"),
    "chunks and length": POST + TE + b"chunked\r\n" + CL + b"3\r\n\r\n" + chunk(b"abc"),
    "two lengths": POST + CL + b"3\r\n" + CL + b"4\r\n\r\nabc",
    "two equal lengths": POST + CL + b"3\r\n" + CL + b"3\r\n\r\nabc",
    "negative length": POST + CL + b"-1\r\n\r\n",
    "signed length": POST + CL + b"+7\r\n\r\n",
    "hexadecimal length": POST + CL + b"0x7\r\n\r\n",
    "list of lengths": POST + CL + b"7, 7\r\n\r\n",
    "length beyond all": POST + CL + b"9" * 30 + b"\r\n\r\n",
    "text as length": POST + CL + b"seven\r\n\r\n",
    "gzip": POST + TE + b"gzip\r\n\r\n",
    "gzip and chunked": POST + TE + b"gzip, chunked\r\n\r\n" + chunk(b"abc"),
    "chunked twice": POST + TE + b"chunked, chunked\r\n\r\n" + chunk(b"abc"),
    "chunked in two headers": POST + TE + b"chunked\r\n" + TE + b"chunked\r\n\r\n" + chunk(b"abc"),
    "unknown coding": POST + TE + b"xchunked\r\n\r\n" + chunk(b"abc"),
    "chunks of HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + chunk(b"abc"),
    "chunk size of letters": CHUNKED + b"xyz\r\nabc\r\n",
    "negative chunk size": CHUNKED + b"-3\r\nabc\r\n",
    "chunk size beyond all": CHUNKED + b"f" * 20 + b"\r\nabc\r\n",
    "empty chunk size": CHUNKED + b"\r\nabc\r\n",
    "chunk too long": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "chunk without line end": CHUNKED + b"3\r\nabcdef",
    "upgrade with a body": POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + CL + b"7\r\n\r\n" + b'{"a":1}',
}
LARGE_HEADS = {
    "100,000 headers": b"GET / HTTP/1.1\r\n" + HEAD + b"".join(b"X%d: y\r\n" % number for number in range(100_000)),
    "101 headers": head(*(b"X%d: y" % number for number in range(100))),
    "header of 1 MB": head(b"X-Request-Id: " + b"a" * 2**20),
    "header name of 1 MB": head(b"a" * 2**20 + b": b"),
    "path of 1 MB": head(path=b"/" + b"a" * 2**20),
    "header of 1 MB without end": b"GET / HTTP/1.1\r\nA: " + b"a" * 2**20,
    "one byte over": head(b"A: " + b"b" * (32 * 2**10 - 4 - 1 - len("Host") - len("localhost") - 4)),
    "chunk extension of 1 MB": CHUNKED + b"3;" + b"a" * 2**20,
    "trailer of 1 MB": CHUNKED + b"0\r\nA: " + b"a" * 2**20,
    "trailers of 1 MB": CHUNKED + b"0\r\n" + b"Abc: d\r\n" * 2**17,
}
SLOW = {
    "head without end": ((b"GET / HTTP/1.1\r\nA: b", 1.0), 408),
    "half a request line": ((b"GE", 1.0), 408),
    "a byte at a time": (tuple(part for byte in b"GET / HTTP/1.1" for part in (bytes([byte]), 0.1)), 408),
    "empty lines": ((b"\r\n", 0.2, b"\r\n", 0.2, b"\r\n", 0.2), 0),
    "nothing": ((1.0,), 0),
    "body without end": ((POST + CL + b"7\r\n\r\n{", 1.0), 408),
    "body a byte at a time": ((POST + CL + b"70\r\n\r\n", *(part for _ in range(8) for part in (b" ", 0.1))), 408),
    "chunks without end": ((CHUNKED, *(part for _ in range(8) for part in (chunk(b" "), 0.1))), 408),
}
REFUSED_BODIES = {
    "length over the limit": (POST + CL + b"%d\r\n\r\n" % (2**20 + 1) + b" " * (2**20 + 1), 413),
    "chunks over the limit": (CHUNKED + chunk(b" " * 2**16) * 17, 413),
    "body of 5 MB": (POST + CL + b"%d\r\n\r\n" % (5 * 2**20) + b" " * 5 * 2**20, 413),
    "100,000 deep": (POST + b"Connection: close\r\n" + CL + b"100000\r\n\r\n" + b"[" * 100_000, 400),
    "not answered for": (b"POST /refuse HTTP/1.1\r\n" + HEAD + CL + b"5000000\r\n\r\n" + b" " * 5_000_000, 401),
}
CASES = [
    *(Case(name, (sent,), 400) for name, sent in (BAD_LINES | BAD_BODIES).items()),
    *(Case(name, (sent,), 431) for name, sent in LARGE_HEADS.items()),
    *(Case(name, parts, status) for name, (parts, status) in SLOW.items()),
    *(Case(name, (sent,), status) for name, (sent, status) in REFUSED_BODIES.items()),
    Case("unknown method", (b"BREW / HTTP/1.1\r\n" + HEAD + b"\r\n",), 405),
    Case("method in small letters", (b"get / HTTP/1.1\r\n" + HEAD + b"\r\n",), 405),
    Case("method of 100,000 letters", (b"A" * 100_000,), 405),
    Case("pipelined", (GET + FULL + BYE,), 200),
    Case("text", (b"hello, is anybody there?\r\n\r\n",), 405),
    Case("nonsense behind a request", (GET + b"BREW /",), 200),
    Case("served after empty lines", (b"\r\n\r\n" + BYE,), 200),
    Case("upgrade without a body", (head(b"Connection: Upgrade", b"Upgrade: h2c"),), 200),
    Case("HTTP/1.0", (b"GET / HTTP/1.0\r\n\r\n",), 200),
    Case("trailers", (CHUNKED + chunk(b'{"a":1}') + b"0\r\nAuthorization: x\r\n\r\n" + BYE,), 200),
]


async def fault(wire: Wire, case: Case) -> str:
    """What is wrong with the answer to a case; "" if nothing is."""
    try:
        answer = await wire.exchange(*case.parts)
    except TimeoutError:
        return f"{case.name}: the connection stays"
    if (answer.statuses or [0])[-1] != case.status:
        return f"{case.name}: {answer.statuses} in place of {case.status}"
    if case.status in (0, 200, 401):
        return ""
    last = answer.last
    is_ours = last.json["error"]["type"] == "invalid_request_error" and "x-content-type-options" in last.headers
    tells = [word for word in (b"Traceback", b"0x", b".py", b"uvicorn") if word in last.raw]
    return "" if is_ours and not tells else f"{case.name}: {last.raw[:300]!r}"


def test_there_are_enough_cases() -> None:
    assert len(CASES) == len({case.name for case in CASES}) >= 60


def test_a_strangers_bytes_are_answered_and_others_are_served() -> None:
    async def run() -> None:
        async with serving(App(), LIMITS, most_connections=500) as wire:
            before = memory()
            others = asyncio.gather(*(wire.get("/") for _ in range(50)))
            faults = await asyncio.gather(*(fault(wire, case) for case in CASES))
            assert not any(faults), "\n".join(filter(None, faults))
            assert {answer.status for answer in await others} == {200}
            assert memory() - before < 50e6
            source = random.Random(0)
            for case in CASES[:40]:  # cut anywhere, and gone
                whole = b"".join(part for part in case.parts if isinstance(part, bytes))
                _, writer = await asyncio.open_connection("127.0.0.1", wire.port)
                writer.write(whole[: source.randrange(len(whole))][: 2**16])
                writer.transport.abort()
            async with asyncio.timeout(PATIENCE):
                while wire.server.server_state.connections or wire.server.server_state.tasks:
                    await asyncio.sleep(0.01)
            assert (await wire.get("/")).status == 200

    asyncio.run(run())


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


def test_a_body_of_100_mb_without_length_takes_no_memory() -> None:
    async def run() -> None:
        async with serving(App(), LIMITS) as wire:
            reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
            writer.write(CHUNKED)
            before, most, part = memory(), 0, chunk(b" " * 2**20)
            line = asyncio.create_task(reader.readline())
            for _ in range(100):
                writer.write(part)
                try:
                    await writer.drain()
                except ConnectionError:
                    break
                most = max(most, memory() - before)
            assert (await asyncio.wait_for(line, PATIENCE)).startswith(b"HTTP/1.1 413 ")
            assert most < 50e6
            writer.transport.abort()

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
        async with serving(App(), Limits(), most_connections=3) as wire:
            held = [await asyncio.open_connection("127.0.0.1", wire.port) for _ in range(3)]
            async with asyncio.timeout(PATIENCE):
                while len(wire.server.server_state.connections) < 3:
                    await asyncio.sleep(0.01)
            refused = await wire.exchange(0.0)
            assert refused.status == 503 and refused.headers["retry-after"] == "2"
            assert refused.json["error"]["code"] == "overloaded"
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
