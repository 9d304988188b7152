"""F4: bytes on raw sockets. Whatever a stranger sends costs little, is answered, and hurts nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hookline.serving.accounting import error_response
from hookline.serving.api_errors import ApiError
from hookline.serving.event_stream import DROP_CONNECTION
from hookline.serving.guards import read_json
from hookline.serving.limits import Limits
from tests.serving.wire import PATIENCE, Answer, Wire, chunk, memory, serving
from tests.suites.raw_cases import BYE, CASES, CHUNKED, Case
from tests.suites.report import SuiteReport, Tally, Tier

LIMITS = Limits(header_seconds=0.5, body_seconds=0.5, reader_seconds=0.5, body_bytes=2**20)
_MUTATED = {Tier.T1: 100, Tier.T2: 5_000}
_TOGETHER = 100
# Until a mutated request must have been answered; a connection that then still waits for the next one gets its last.
_WAIT = 1.5 * max(LIMITS.header_seconds, LIMITS.body_seconds)
_OTHERS, _CUT = 50, 40
_MEMORY_BYTES = 50 * 10**6
# Of a case, what is changed: the rest of a megabyte would be sent for nothing.
_MOST_BYTES = 2**16
_STATUSES = {100, 200, 400, 401, 404, 405, 408, 411, 413, 431}
_TELLING = (b"Traceback", b"0x", b".py", b"uvicorn")
# Put between the bytes of a sound or unsound request.
_PIECES = (
    b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b": ", b"\xff", b"\xc3", b"%00", b"/../", b"//", b"?",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: 99999999999\r\n", b"0\r\n\r\n",
    b"Host: a\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"HTTP/1.0",
    b"Content-Encoding: gzip\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"a" * 40_000, b"{", b'"', b"[[[[",
)  # fmt: skip


def run(tier: Tier, seed: int) -> SuiteReport:
    statuses = [str(status) for status in sorted({case.status for case in CASES} - {0})]
    forced = [
        *statuses,
        "closed",
        "mutated, served",
        "mutated, refused",
        "cut",
        "others served",
        "100 MB refused",
    ]
    tally = Tally("F4", tier, seed, len(CASES) + _CUT + 2 + _MUTATED[tier], forced)
    asyncio.run(_run(tally, _MUTATED[tier]))
    return tally.report()


async def _run(tally: Tally, mutated: int) -> None:
    async with serving(App(), LIMITS, most_connections=500) as wire:
        before = memory()
        others = asyncio.gather(*(wire.get("/") for _ in range(_OTHERS)))
        await asyncio.gather(*(_ask(tally, wire, case) for case in CASES))
        await _await_others(tally, others)
        for case in CASES[:_CUT]:  # cut anywhere, and gone
            with tally.case(f"{case.name}, cut"):
                whole = _whole(case)
                _, writer = await asyncio.open_connection("127.0.0.1", wire.port)
                writer.write(whole[: tally.random.randrange(len(whole))][:_MOST_BYTES])
                writer.transport.abort()
                tally.event("cut")
        with tally.case("a body of 100 MB without length"):
            await _flood(tally, wire)
        made = _mutations(tally.random, mutated)
        others = asyncio.gather(*(wire.get("/") for _ in range(_OTHERS)))
        await asyncio.gather(*(_ask_mutated(tally, wire, made) for _ in range(_TOGETHER)))
        await _await_others(tally, others)
        with tally.case("after all"):
            async with asyncio.timeout(PATIENCE):
                while wire.server.server_state.connections or wire.server.server_state.tasks:
                    await asyncio.sleep(0.01)
            tally.expect((await wire.get("/")).status == 200, "after all, a sound request is not served")
            grown = memory() - before
            tally.expect(grown < _MEMORY_BYTES, f"memory has grown by {grown:,} bytes")


async def _await_others(tally: Tally, others: asyncio.Future[list[Answer]]) -> None:
    statuses = [answer.status for answer in await others]
    tally.event("others served", statuses.count(200))
    tally.expect(set(statuses) == {200}, f"other clients get {statuses}")


async def _ask(tally: Tally, wire: Wire, case: Case) -> None:
    with tally.case(case.name):
        answer = await wire.exchange(*case.parts)
        status = (answer.statuses or [0])[-1]
        tally.expect(status == case.status, f"{case.name}: {answer.statuses} in place of {case.status}")
        tally.event(str(status) if status else "closed")
        if status not in (0, 200, 401):
            _judge_refusal(tally, case.name, answer.last)


async def _ask_mutated(tally: Tally, wire: Wire, made: Iterator[bytes]) -> None:
    """One after the other, until all clients together have sent all of them."""
    for sent in made:
        label = f"{sent!r:.400}"
        with tally.case(label):
            answer = await wire.exchange(sent, _WAIT, BYE)
            statuses = answer.statuses
            tally.expect(set(statuses) <= _STATUSES, f"{label}: {statuses}")
            tally.expect(bool(statuses) or not answer.raw, f"{label}: {answer.raw[:200]!r}")
            kind = "served" if statuses[:1] == [200] else "refused" if statuses else "closed"
            tally.event(f"mutated, {kind}")
            if statuses and statuses[-1] not in (200, 401):
                _judge_refusal(tally, label, answer.last)


def _judge_refusal(tally: Tally, label: str, last: Answer) -> None:
    ours = last.json["error"]["type"] == "invalid_request_error" and "x-content-type-options" in last.headers
    tells = [word for word in _TELLING if word in last.raw]
    tally.expect(ours and not tells, f"{label}: {last.raw[:300]!r}")


async def _flood(tally: Tally, wire: Wire) -> None:
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
    found = await asyncio.wait_for(line, PATIENCE)
    writer.transport.abort()
    tally.event("100 MB refused", found.startswith(b"HTTP/1.1 413 "))
    tally.expect(most < _MEMORY_BYTES, f"a body of 100 MB takes {most:,} bytes")


def _whole(case: Case) -> bytes:
    return b"".join(part for part in case.parts if isinstance(part, bytes))


def _mutations(rng: random.Random, count: int) -> Iterator[bytes]:
    """The cases' bytes, half of them of sound ones, each changed in up to four places."""
    sound = [_whole(case) for case in CASES if case.status == 200]
    known = [_whole(case)[:_MOST_BYTES] for case in CASES if _whole(case)]
    for _ in range(count):
        sent = bytearray(rng.choice(rng.choice((sound, known))))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(min(len(sent), 200) + 1)  # a head is short; what lies behind it is all alike
            end = place + rng.randint(1, 12)
            match rng.randrange(6):
                case 0:
                    sent[place:place] = rng.choice(_PIECES)
                case 1:
                    sent[place:end] = b""
                case 2:
                    sent[place:place] = sent[place:end]
                case 3:
                    sent[place:end] = rng.choice(_PIECES)
                case 4:
                    sent[place:end] = rng.randbytes(end - place)
                case 5:
                    sent[place:] = rng.choice(known)[place:]
        yield bytes(sent)


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
                body = str(await read_json(Request(scope, receive), LIMITS, len)).encode()
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
