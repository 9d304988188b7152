"""C3: clients that do not take what they ask for cost bounded memory, are let go in time, and slow nobody down."""

from __future__ import annotations

import asyncio
import select
import socket
import statistics
import time
from contextlib import suppress
from typing import Any

import psutil

from tests.suites.raw_client import Connection, Told, request_bytes, stream
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, Watch, metric, metrics, serving, until_true

_SLOW = {Tier.T1: 4, Tier.T2: 64}
_NORMAL = {Tier.T1: 32, Tier.T2: 64}
_ROUNDS = {Tier.T1: 1, Tier.T2: 10}
_READER_SECONDS = {Tier.T1: 1.0, Tier.T2: 30.0}
_MOST_MEMORY = 50 * 2**20
# More than the 2.3 MB that a connection's buffers hold: twenty alternatives to each token of many prompts.
_LARGE: dict[str, Any] = {
    "prompt": [[number, *range(230)] for number in range(32)],
    "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True,
}  # fmt: skip
_SMALL_ONE: dict[str, Any] = {"prompt": "b", "max_tokens": 20, "ignore_eos": True, "temperature": 0}


def run(tier: Tier, seed: int) -> SuiteReport:
    planned = _NORMAL[tier] + _ROUNDS[tier] * (_SLOW[tier] + _NORMAL[tier])
    tally = Tally("C3", tier, seed, planned, ("slow ones let go", "others served meanwhile"))
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        async with serving(model, "--reader-seconds", str(_READER_SECONDS[tier])) as served:
            watch = Watch(tally, served)
            await watch.begin()
            # As many who do read: what the answers themselves take is no slow reader's cost.
            await asyncio.gather(*(stream(served.port, _LARGE) for _ in range(_SLOW[tier])))
            alone = await _normal(tally, served, _NORMAL[tier])
            for _ in range(_ROUNDS[tier]):
                await _round(tally, served, tier, alone)
                await watch.check("when the slow ones have gone")


async def _round(tally: Tally, served: Served, tier: Tier, alone: float) -> None:
    port, process = served.port, psutil.Process(served.process.pid)
    memory = process.memory_info().rss
    gone = await _gone(port)
    slow = [asyncio.create_task(_read_slowly(port, _READER_SECONDS[tier])) for _ in range(_SLOW[tier])]
    tally.cases += len(slow)
    beside = await _normal(tally, served, _NORMAL[tier])
    grown = process.memory_info().rss - memory
    tally.expect(grown < _MOST_MEMORY, f"{len(slow)} slow readers cost {grown / 2**20:.0f} MiB")
    # They share the engine with the slow ones until those have their tokens: at T1 that is all of the time.
    if tier is Tier.T2:
        tally.expect(beside < 2 * alone, f"the slowest of 100 took {beside:.3f} s, and {alone:.3f} s without slow ones")

    async def all_gone() -> bool:
        return await _gone(port) - gone >= len(slow)

    let_go = await until_true(all_gone, 30.0 + 2 * _READER_SECONDS[tier])
    tally.event("slow ones let go", int(await _gone(port) - gone))
    tally.expect(let_go, f"of {len(slow)} slow readers {await _gone(port) - gone:g} ended as client_gone")
    for ended in await asyncio.gather(*slow):
        tally.expect(ended, "a slow reader was never let go")


async def _gone(port: int) -> float:
    return metric(await metrics(port), "request_success_total", finished_reason="client_gone")


async def _normal(tally: Tally, served: Served, count: int) -> float:
    """Requests of clients that read, eight at a time; the seconds of the slowest of 100."""
    seconds: list[float] = []

    async def one() -> None:
        for _ in range(count // 8):
            with tally.case("a client that reads"):
                began, told = time.monotonic(), Told()
                async with Connection(served.port) as connection:
                    connection.send("POST", "/v1/completions", {**_SMALL_ONE, "stream": True})
                    await connection.follow(told)
                seconds.append(time.monotonic() - began)
                tally.expect(told.done and told.finish == {0: "length"}, f"a client that reads got {told}")
                tally.event("others served meanwhile")

    await asyncio.gather(*(one() for _ in range(8)))
    return statistics.quantiles(seconds, n=100)[98]


async def _read_slowly(port: int, reader_seconds: float) -> bool:
    """Reads one byte a second; whether the server dropped the connection."""
    loop, patience = asyncio.get_running_loop(), 60.0 + 3 * reader_seconds
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
                connection.recv(1)
            await asyncio.sleep(1.0)
        return bool(dropped.poll(0))
