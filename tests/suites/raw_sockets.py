"""F4: bytes on raw sockets. Whatever a stranger sends costs little, is answered, and hurts nobody.

All of it goes to the front alone, and all cases with a share of the mutations to a whole server as well, beside two
clients whose streams go on. A client, or the server, may be late, and a status become that of a deadline: such a case
is sent again when nobody else is there, until it gets its own.

At T2 the time that requests of others take is measured beside strangers who send all cases and mutated requests and,
before each such window, beside as many who send sound ones at the same pace; clients share one event loop, with the
front alone as well, so that any company costs time. The medians of the windows' slowest of 100 are compared: single
windows tell of the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hookline.serving.accounting import error_response
from hookline.serving.api_errors import ApiError
from hookline.serving.intake import Intake
from hookline.serving.limits import Limits
from hookline.serving.replies.event_stream import DROP_CONNECTION
from tests.serving.wire import PATIENCE, Answer, Wire, chunk, memory, read_all, serving
from tests.suites import served as real
from tests.suites import soak
from tests.suites.raw_cases import BYE, CASES, CHUNKED, MOST_BYTES, SERVER_CHUNKED, Case, mutations, server_cases
from tests.suites.raw_client import Reply, request_bytes, stream
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.watch import Watch, judge

LIMITS = Limits(header_seconds=0.5, body_seconds=0.5, reader_seconds=0.5, body_bytes=2**20)
# A whole server shares the machine with its engine, and gets more time.
_SERVER_SECONDS = 1.0
_SERVER_OPTIONS = (
    *("--header-seconds", str(_SERVER_SECONDS), "--body-seconds", str(_SERVER_SECONDS)),
    *("--max-body", str(LIMITS.body_bytes)),
)
# Windows in which others are timed, where that is judged, and how many of them ask one request after the other.
_WINDOWS, _TIMED = 10, 4
_MUTATED = {Tier.T1: 100, Tier.T2: 5_000}
_SERVER_MUTATED = {Tier.T1: 60, Tier.T2: 500}
# Of a whole server, in windows.
_SERVER_TIMED = {Tier.T1: 0, Tier.T2: 2_000}
_TOGETHER = 100
# Of a deadline, until a mutated request must have been answered; a connection that then still waits for the next one
# gets its last.
_PATIENT = 1.5
_OTHERS, _CUT, _SERVER_CUT, _STREAMS = 50, 40, 10, 2
_PAUSE = 0.01  # between the requests of a client that is timed
_MEMORY_BYTES = 50 * 10**6
_STATUSES = {100, 200, 400, 401, 404, 405, 408, 411, 413, 415, 431}
# What a case may get in place of its own status where it, or the server, is late: closed, or told so. Alone it has so
# many tries more, each after a while longer than the last.
_LATE, _TRIES, _REST = (0, 408), 3, 0.5
_TELLING = (b"Traceback", b"0x", b".py", b"uvicorn")
_STREAM: dict[str, Any] = {"prompt": "Meanwhile, ", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
_SMALL: dict[str, Any] = {"prompt": "Meanwhile, ", "max_tokens": 2, "ignore_eos": True, "temperature": 0}


def run(tier: Tier, seed: int) -> SuiteReport:
    shared = ["closed", "mutated, served", "mutated, refused", "cut", "others served", "100 MB refused"]
    forced = [*_statuses(CASES), *shared, *(f"server: {name}" for name in (*_statuses(server_cases()), *shared))]
    planned = 2 * (len(CASES) + 2) + _CUT + _SERVER_CUT
    planned += _MUTATED[tier] + _SERVER_MUTATED[tier] + _SERVER_TIMED[tier]
    if tier is Tier.T2:
        planned += 2 * _WINDOWS * len(CASES)
    tally = Tally("F4", tier, seed, planned, forced)
    asyncio.run(_run_front(tally, tier))
    asyncio.run(_run_server(tally, tier))
    return tally.report()


def _statuses(cases: list[Case]) -> list[str]:
    return [str(status) for status in sorted({case.status for case in cases} - {0})]


class Outside(Wire):
    """The way to a server of another process."""

    def __init__(self, port: int) -> None:
        self.port = port


@dataclass(frozen=True, slots=True)
class _Target:
    """To whom strangers send.

    Attributes:
        name: before the names of its cases and events.
        chunked: a head that a body in chunks follows.
        other: what other clients send meanwhile.
        seconds: that a head or a body may take.
        memory: bytes that it has.
    """

    tally: Tally
    wire: Wire
    name: str
    chunked: bytes
    other: bytes
    seconds: float
    memory: Callable[[], int]

    def event(self, name: str, times: int = 1) -> None:
        self.tally.event(self.name + name, times)

    def expect(self, holds: bool, what: str) -> None:
        self.tally.expect(holds, self.name + what)

    def look(self, label: str, answer: Answer) -> None:
        """I8 and I9 of all answers of a connection; it may have got none."""
        if answer.statuses:
            judge(self.tally, self.name + label, Reply(max(answer.statuses), answer.last.headers, answer.raw))


class _Logged(logging.Handler):
    """An error that the front logs is a failure; of a whole server the watch reads what it says."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.ERROR)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self._tally.fail(f"the front logs {record.getMessage()!r}: {cause!r}")


async def _run_front(tally: Tally, tier: Tier) -> None:
    log, handler = logging.getLogger("uvicorn.error"), _Logged(tally)
    log.addHandler(handler)
    try:
        await _send_to_front(tally, tier)
    finally:
        log.removeHandler(handler)


async def _send_to_front(tally: Tally, tier: Tier) -> None:
    async with serving(App(), LIMITS, most_connections=500) as wire:
        target = _Target(tally, wire, "", CHUNKED, BYE, LIMITS.header_seconds, memory)
        before = memory()
        others = asyncio.gather(*(_ask_other(target) for _ in range(_OTHERS)))
        late = list[Case]()
        await asyncio.gather(*(_ask(target, case, late) for case in CASES))
        await others
        for case in late:
            await _ask_alone(target, case)
        await _cut(target, CASES[:_CUT])
        await _flood(target)
        made = mutations(tally.random, CASES, _MUTATED[tier])
        if tier is Tier.T1:
            others = asyncio.gather(*(_ask_other(target) for _ in range(_OTHERS)))
            await asyncio.gather(*(_ask_mutated(target, made) for _ in range(_TOGETHER)))
            await others
        else:
            await _timed(target, CASES, made, _MUTATED[tier] // _WINDOWS)
        with tally.case("after all"):
            async with asyncio.timeout(PATIENCE):
                while wire.server.server_state.connections or wire.server.server_state.tasks:
                    await asyncio.sleep(0.01)
            await _judge_end(target, before)


async def _run_server(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        async with real.serving(model, *_SERVER_OPTIONS) as served:
            watch, pid = Watch(tally, served), served.process.pid
            await watch.begin(grammars=False)
            wire, cases = Outside(served.port), server_cases()
            small = request_bytes(served.port, "POST", "/v1/completions", _SMALL, {"Connection": "close"})
            seconds, held = _SERVER_SECONDS, partial(soak.memory, pid)
            target = _Target(tally, wire, "server: ", SERVER_CHUNKED, small, seconds, held)
            due, over = (await stream(served.port, _STREAM)).text(), asyncio.Event()
            before = target.memory()
            others = asyncio.gather(*(_stream_on(target, due, before, over) for _ in range(_STREAMS)))
            made = mutations(tally.random, cases, _SERVER_MUTATED[tier])
            late, strangers = list[Case](), [_ask_mutated(target, made) for _ in range(_TOGETHER)]
            await asyncio.gather(*(_ask(target, case, late) for case in cases), *strangers)
            await _cut(target, tally.random.sample(cases, _SERVER_CUT))
            await _flood(target)
            over.set()
            await others
            for case in late:
                await _ask_alone(target, case)
            if count := _SERVER_TIMED[tier]:
                await _timed(target, cases, mutations(tally.random, cases, count), count // _WINDOWS)
            with tally.case("server: after all"):
                await _judge_end(target, before)
                await watch.check("after what strangers sent")


async def _stream_on(target: _Target, due: str, before: int, over: asyncio.Event) -> None:
    """A client who has one stream after the other; behind each the server's memory is looked at."""
    while not over.is_set():
        told = await stream(target.wire.port, _STREAM)
        judge(target.tally, f"{target.name}another client", told)
        whole = told.done and told.text() == due
        target.expect(whole, f"another client's stream is not {due!r}: {told}")
        target.event("others served", whole)
        _judge_memory(target, before)


async def _judge_end(target: _Target, before: int) -> None:
    answer = await target.wire.get("/")
    target.look("after all", answer)
    target.expect(answer.status == 200, "after all, a sound request is not served")
    _judge_memory(target, before)


def _judge_memory(target: _Target, before: int) -> None:
    grown = target.memory() - before
    target.expect(grown < _MEMORY_BYTES, f"memory has grown by {grown:,} bytes")


async def _timed(target: _Target, cases: list[Case], made: Iterator[bytes], count: int) -> None:
    """Windows of strangers, sound and hostile ones by turns, who send all cases and `count` mutated requests."""
    sound = [case.whole for case in cases if case.status == 200 and b"POST" not in case.whole]  # a model's work is dear
    slowest: dict[bool, list[float]] = {True: [], False: []}
    late = list[Case]()
    while batch := list(itertools.islice(made, count)):
        hostile: list[Case | bytes] = [*cases, *batch]
        target.tally.random.shuffle(hostile)
        known = iter(target.tally.random.choices(sound, k=len(hostile)))
        for is_hostile in (False, True):
            rest = iter(hostile)
            asked = (
                _ask_any(target, rest, late) if is_hostile else _ask_soundly(target, known) for _ in range(_TOGETHER)
            )
            strangers = asyncio.gather(*asked)
            timed = await asyncio.gather(*(_time_other(target, strangers) for _ in range(_TIMED)))
            await strangers
            slowest[is_hostile].append(statistics.quantiles(itertools.chain(*timed), n=100)[98])
    for case in late:
        await _ask_alone(target, case)
    beside, usual = (statistics.median(slowest[is_hostile]) for is_hostile in (True, False))
    told = f"others' slowest of 100 took {beside:.3f} s beside hostile requests, and {usual:.3f} s beside sound ones"
    target.expect(beside < 2 * usual, told)


async def _ask_any(target: _Target, hostile: Iterator[Case | bytes], late: list[Case]) -> None:
    """One after the other: cases, and mutated requests."""
    for sent in hostile:
        if isinstance(sent, Case):
            await _ask(target, sent, late)
        else:
            await _ask_mutated(target, iter((sent,)))


async def _time_other(target: _Target, strangers: asyncio.Future[Any]) -> list[float]:
    """Seconds of another client's requests while strangers are there."""
    seconds = list[float]()
    while not strangers.done():
        seconds.append(await _ask_other(target))
        await asyncio.sleep(_PAUSE)
    return seconds


async def _ask_other(target: _Target) -> float:
    """Another client's request, which is served; the seconds that it took.

    Who stood still with the machine misses the deadline of a head, and asks again. Whoever is cut off on purpose is so
    each time, or before that deadline.
    """
    seconds = 0.0
    for number in range(_TRIES):
        await asyncio.sleep(number * _REST)
        began = time.monotonic()
        answer = await target.wire.exchange(target.other)
        took = time.monotonic() - began
        seconds += took
        target.look("another client", answer)
        if answer.raw or took < target.seconds:
            break
    target.expect(answer.status == 200, f"another client gets {answer.status} after {took:.2f} s, try {number + 1}")
    target.event("others served", answer.status == 200)
    return seconds


async def _ask_soundly(target: _Target, known: Iterator[bytes]) -> None:
    """At the pace of `_ask_mutated`."""
    for sent in known:
        answer = await target.wire.exchange(sent, _PATIENT * target.seconds, BYE)
        target.look("a sound stranger", answer)
        found = answer.statuses or [0]
        target.expect(200 in found or found[-1] in _LATE, f"a sound stranger gets {answer.statuses}")


async def _ask(target: _Target, case: Case, late: list[Case]) -> None:
    """Sends a case. One that was late is put into `late`."""
    with target.tally.case(target.name + case.name):
        status = await _send(target, case)
        if status != case.status and status in _LATE:
            late.append(case)
        else:
            _judge_status(target, case, status)


async def _ask_alone(target: _Target, case: Case) -> None:
    """Sends a case that was late again: it must get its own status, which no case passes without."""
    with target.tally.case(f"{target.name}{case.name}, alone"):
        for number in range(_TRIES):
            await asyncio.sleep(number * _REST)
            status = await _send(target, case)
            if status == case.status or status not in _LATE:
                break
        _judge_status(target, case, status)


def _judge_status(target: _Target, case: Case, status: int) -> None:
    target.expect(status == case.status, f"{case.name}: {status} in place of {case.status}")
    target.event(str(status) if status else "closed")


async def _send(target: _Target, case: Case) -> int:
    """The status of the last answer; 0 where the connection was closed without one."""
    answer = await target.wire.exchange(*case.parts)
    _judge(target, case.name, answer)
    return (answer.statuses or [0])[-1]


async def _ask_mutated(target: _Target, made: Iterator[bytes]) -> None:
    """One after the other, until all clients together have sent all of them."""
    for sent in made:
        label = f"{sent!r:.400}"
        with target.tally.case(target.name + label):
            answer = await target.wire.exchange(sent, _PATIENT * target.seconds, BYE)
            statuses = answer.statuses
            kind = "served" if statuses[:1] == [200] else "refused" if statuses else "closed"
            target.event(f"mutated, {kind}")
            _judge(target, label, answer)


def _judge(target: _Target, label: str, answer: Answer) -> None:
    """Whatever was sent: one of the statuses, nothing else; a refusal is an error of ours that tells nothing."""
    statuses = answer.statuses
    target.expect(set(statuses) <= _STATUSES, f"{label}: {statuses}")
    if not statuses:
        target.expect(not answer.raw, f"{label}: {answer.raw[:200]!r}")
        return
    last = answer.last
    target.look(label, answer)
    if last.status not in (200, 401):
        due = "not_found_error" if last.status == 404 else "invalid_request_error"
        ours = last.json["error"]["type"] == due and "x-content-type-options" in last.headers
        tells = [word for word in _TELLING if word in last.raw]
        target.expect(ours and not tells, f"{label}: {last.raw[:300]!r}")


async def _cut(target: _Target, cases: list[Case]) -> None:
    """Clients that have gone, anywhere in what they send."""
    for case in cases:
        with target.tally.case(f"{target.name}{case.name}, cut"):
            whole = case.whole
            _, writer = await asyncio.open_connection("127.0.0.1", target.wire.port)
            writer.write(whole[: target.tally.random.randrange(len(whole) or 1)][:MOST_BYTES])
            writer.transport.abort()
            target.event("cut")


async def _flood(target: _Target) -> None:
    with target.tally.case(f"{target.name}a body of 100 MB without length"):
        for number in range(_TRIES):
            await asyncio.sleep(number * _REST)
            if (status := await _send_flood(target)) not in _LATE:
                break
        target.event("100 MB refused", status == 413)


async def _send_flood(target: _Target) -> int:
    """The status; 0 where there was none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.wire.port)
    writer.write(target.chunked)
    before, most, part = target.memory(), 0, chunk(b" " * 2**20)
    reading = asyncio.create_task(read_all(reader))
    for _ in range(100):
        writer.write(part)
        try:
            await writer.drain()
        except ConnectionError:
            break
        most = max(most, target.memory() - before)
    answer = Answer(await asyncio.wait_for(reading, PATIENCE))
    writer.transport.abort()
    target.look("100 MB", answer)
    target.expect(most < _MEMORY_BYTES, f"a body of 100 MB takes {most:,} bytes")
    return (answer.statuses or [0])[-1]


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
