"""F4: bytes on raw sockets. Whatever a stranger sends costs little, is answered, and hurts nobody.

At T2 the time that requests of others take is measured beside strangers who send mutated requests and, before each such
window, beside as many who send sound ones at the same pace; server and clients share one event loop, so that any
company costs time. The medians of the windows' slowest of 100 are compared: single windows tell of the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hookline.serving.accounting import error_response
from hookline.serving.api_errors import ApiError
from hookline.serving.intake import Intake
from hookline.serving.limits import Limits
from hookline.serving.replies.event_stream import DROP_CONNECTION
from tests.serving.wire import PATIENCE, Answer, Wire, chunk, memory, serving
from tests.suites.raw_cases import BYE, CASES, CHUNKED, Case
from tests.suites.report import SuiteReport, Tally, Tier

LIMITS = Limits(header_seconds=0.5, body_seconds=0.5, reader_seconds=0.5, body_bytes=2**20)
# Windows in which others are timed, where that is judged, and how many of them ask one request after the other.
_WINDOWS, _TIMED = 10, 4
_MUTATED = {Tier.T1: 100, Tier.T2: 5_000}
_TOGETHER = 100
# Until a mutated request must have been answered; a connection that then still waits for the next one gets its last.
_WAIT = 1.5 * max(LIMITS.header_seconds, LIMITS.body_seconds)
_OTHERS, _CUT = 50, 40
_PAUSE = 0.01  # between the requests of a client that is timed
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
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
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
        made = _mutations(tally.random, _MUTATED[tier])
        if tier is Tier.T1:
            others = asyncio.gather(*(wire.get("/") for _ in range(_OTHERS)))
            await asyncio.gather(*(_ask_mutated(tally, wire, made) for _ in range(_TOGETHER)))
            await _await_others(tally, others)
        else:
            await _timed(tally, wire, made, _MUTATED[tier] // _WINDOWS)
        with tally.case("after all"):
            async with asyncio.timeout(PATIENCE):
                while wire.server.server_state.connections or wire.server.server_state.tasks:
                    await asyncio.sleep(0.01)
            tally.expect((await wire.get("/")).status == 200, "after all, a sound request is not served")
            grown = memory() - before
            tally.expect(grown < _MEMORY_BYTES, f"memory has grown by {grown:,} bytes")


async def _timed(tally: Tally, wire: Wire, made: Iterator[bytes], count: int) -> None:
    """Windows of `count` requests of strangers, sound ones and mutated ones by turns."""
    sound = [case for case in CASES if case.status == 200]
    slowest: dict[bool, list[float]] = {True: [], False: []}
    while batch := list(itertools.islice(made, count)):
        known = iter([_whole(tally.random.choice(sound)) for _ in batch])
        for is_mutated, sent in ((False, known), (True, iter(batch))):
            ask = _ask_mutated if is_mutated else _ask_soundly
            strangers = asyncio.gather(*(ask(tally, wire, sent) for _ in range(_TOGETHER)))
            timed = await asyncio.gather(*(_time_other(tally, wire, strangers) for _ in range(_TIMED)))
            await strangers
            slowest[is_mutated].append(statistics.quantiles(itertools.chain(*timed), n=100)[98])
    beside, usual = (statistics.median(slowest[is_mutated]) for is_mutated in (True, False))
    told = f"others' slowest of 100 took {beside:.3f} s beside mutated requests, and {usual:.3f} s beside sound ones"
    tally.expect(beside < 2 * usual, told)


async def _time_other(tally: Tally, wire: Wire, strangers: asyncio.Future[Any]) -> list[float]:
    """Seconds of another client's requests while strangers are there."""
    seconds = list[float]()
    while not strangers.done():
        began = time.monotonic()
        answer = await wire.get("/")
        seconds.append(time.monotonic() - began)
        tally.expect(answer.status == 200, f"another client gets {answer.status}")
        tally.event("others served")
        await asyncio.sleep(_PAUSE)
    return seconds


async def _ask_soundly(tally: Tally, wire: Wire, known: Iterator[bytes]) -> None:
    """At the pace of `_ask_mutated`."""
    for sent in known:
        answer = await wire.exchange(sent, _WAIT, BYE)
        tally.expect(200 in answer.statuses, f"a sound stranger gets {answer.statuses}")


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
        self._intake = Intake(LIMITS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.methods.append(scope["method"])
        self.paths.append(scope["path"])
        status, body = 200, b"ok"
        try:
            if scope["path"] == "/json":
                body = str(await self._intake.read(Request(scope, receive), len)).encode()
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
