"""C3: clients that do not take what they ask for cost bounded memory, are let go in time, and slow nobody down.

At T2 windows of normal requests are timed beside the slow ones, and alone before and after that, in every round, and
the medians of the slowest of 100 in each window are compared: single windows tell of what else the machine does. The
slow ones come one after the other and are timed when all hold what they have: the engine's work for them is no less
for those who read.
"""

from __future__ import annotations

import asyncio
import select
import socket
import statistics
import time
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.suites.invariants import leak_faults
from tests.suites.raw_client import Connection, Told, request_bytes, stream
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import load, metric, metrics, serving, until_true
from tests.suites.watch import Watch

_SLOW = {Tier.T1: 4, Tier.T2: 64}
# Normal clients at a time, what each asks for in a window, and windows of each kind in a round.
_NORMAL = {Tier.T1: 8, Tier.T2: 64}
_EACH = {Tier.T1: 4, Tier.T2: 2}
_WINDOWS = {Tier.T1: 1, Tier.T2: 8}
_READERS = 4
_ROUNDS = {Tier.T1: 1, Tier.T2: 2}
# At T2 until all of the slow ones are there and have been timed.
_READER_SECONDS = {Tier.T1: 1.0, Tier.T2: 240.0}
# Of all slow readers together; the buffers of their connections are the kernel's. What the limits let them ask for
# takes 17 MiB each.
_MOST_MEMORY = {Tier.T1: 50 * 2**20, Tier.T2: 64 * 24 * 2**20}
# More than the 2.3 MB that a connection's buffers hold: twenty alternatives to each token of many prompts.
_LARGE: dict[str, Any] = {
    "prompt": [[number, *range(230)] for number in range(32)],
    "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True,
}  # fmt: skip
_SMALL_ONE: dict[str, Any] = {"prompt": "b", "max_tokens": 20, "ignore_eos": True, "temperature": 0}


def run(tier: Tier, seed: int) -> SuiteReport:
    normal = (3 * _WINDOWS[tier] - 1) * _NORMAL[tier] * _EACH[tier]
    forced = ["slow ones let go", "others served meanwhile", *(["windows beside all slow ones"] if tier > 1 else [])]
    tally = Tally("C3", tier, seed, _ROUNDS[tier] * (_SLOW[tier] + normal), forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    alone, beside = list[float](), list[float]()
    with tiny_model() as model:
        # As many answers as all slow ones leave unread may lie there.
        room = ("--max-waiting", "2100", "--reader-seconds", str(_READER_SECONDS[tier]))
        async with serving(model, *room) as served:
            watch = Watch(tally, served)
            await watch.begin(grammars=False)
            # Some who do read: what the answers themselves take is no slow reader's cost.
            for reader in await asyncio.gather(*(stream(served.port, _LARGE) for _ in range(_READERS))):
                watch.reply("one who reads", reader)
            for _ in range(_ROUNDS[tier]):
                alone += [await _normal(watch, tier) for _ in range(_WINDOWS[tier])]
                beside += await _round(watch, tier)
                alone += [await _normal(watch, tier) for _ in range(_WINDOWS[tier] - 1)]
                await watch.check("when the slow ones have gone")
    # At T1 they share the engine with the slow ones, which have not got their tokens yet.
    if tier is Tier.T2 and beside:
        usual, found = statistics.median(alone), statistics.median(beside)
        told = f"the slowest of 100 took {found:.3f} s beside slow ones, and {usual:.3f} s alone"
        tally.expect(found < 2 * usual, told)


async def _round(watch: Watch, tier: Tier) -> list[float]:
    """Slow readers come, are timed and let go; windows while all of them were there."""
    tally, port, process = watch.tally, watch.served.port, psutil.Process(watch.served.process.pid)
    memory = process.memory_info().rss
    before = await _gone(port)
    slow = list[asyncio.Task[bool]]()
    for _ in range(_SLOW[tier]):
        slow.append(asyncio.create_task(_read_slowly(watch, _READER_SECONDS[tier])))
        if tier is Tier.T2:
            await _is_done_for(port)
    tally.cases += len(slow)
    beside = list[float]()
    for _ in range(_WINDOWS[tier]):
        seconds = await _normal(watch, tier)
        if await _gone(port) == before:
            beside.append(seconds)
            tally.event("windows beside all slow ones")
    grown = process.memory_info().rss - memory
    tally.expect(grown < _MOST_MEMORY[tier], f"{len(slow)} slow readers cost {grown / 2**20:.0f} MiB")

    async def all_gone() -> bool:
        return await _gone(port) - before >= len(slow)

    let_go = await until_true(all_gone, 30.0 + 2 * _READER_SECONDS[tier])
    tally.event("slow ones let go", int(await _gone(port) - before))
    tally.expect(let_go, f"of {len(slow)} slow readers {await _gone(port) - before:g} ended as client_gone")
    for ended in await asyncio.gather(*slow):
        tally.expect(ended, "a slow reader was never let go")
    return beside


async def _is_done_for(port: int) -> None:
    """Waits until the engine has taken a request that has just been sent, and has worked it off."""

    async def works() -> bool:
        return any((await load(port)).values())

    async def rests() -> bool:
        return not await works()

    await until_true(works, 5.0)
    await until_true(rests, 60.0)


async def _gone(port: int) -> float:
    return metric(await metrics(port), "request_success_total", finished_reason="client_gone")


async def _normal(watch: Watch, tier: Tier) -> float:
    """A window of requests of clients that read; the seconds of the slowest of 100."""
    tally, seconds = watch.tally, list[float]()

    async def one() -> None:
        for _ in range(_EACH[tier]):
            with tally.case("a client that reads"):
                began, told = time.monotonic(), Told()
                async with Connection(watch.served.port) as connection:
                    connection.send("POST", "/v1/completions", {**_SMALL_ONE, "stream": True})
                    await connection.follow(told)
                seconds.append(time.monotonic() - began)
                watch.reply("a client that reads", told)
                tally.expect(told.done and told.finish == {0: "length"}, f"a client that reads got {told}")
                tally.event("others served meanwhile")

    await asyncio.gather(*(one() for _ in range(_NORMAL[tier])))
    return statistics.quantiles(seconds, n=100)[98]


async def _read_slowly(watch: Watch, reader_seconds: float) -> bool:
    """Reads one byte a second; whether the server dropped the connection."""
    port, loop, patience, read = watch.served.port, asyncio.get_running_loop(), 60.0 + 3 * reader_seconds, b""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, request_bytes(port, "POST", "/v1/completions", _LARGE))
        dropped = select.poll()
        dropped.register(connection, select.POLLHUP | select.POLLERR)
        deadline = loop.time() + patience
        while not dropped.poll(0) and loop.time() < deadline:
            with suppress(BlockingIOError):
                read += connection.recv(1)
            await asyncio.sleep(1.0)
        for fault in leak_faults(read.decode("latin-1"), {}):
            watch.tally.fail(f"a slow reader: {fault}")
        return bool(dropped.poll(0))
