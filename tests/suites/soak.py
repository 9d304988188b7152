"""S1: a day of mixed requests in an hour. Nothing grows with their number, and the last are served as the first.

At T2 the engine's process is killed twice in the midst of requests. Its death ends the server, whose place a new one
takes on the same port; memory is judged within each server's life, the time that requests take over all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.suites.kills import kill
from tests.suites.raw_client import Connection, Told
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, serving
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 1_000, Tier.T2: 172_800}
# Servers one after the other; the next one comes when the engine of the last has been killed.
_LIVES = {Tier.T1: 1, Tier.T2: 3}
_CHECK_EVERY = {Tier.T1: 500, Tier.T2: 5_000}
_TOGETHER = 24
# Of every twenty requests.
_MIX = (*("normal",) * 12, *("abort",) * 3, *("invalid",) * 2, "grammar", "several", "over-long")
# Requests of a life before its memory is judged: tokenizers keep what they made of the last 10,000 texts.
_WARM_UP = {Tier.T1: 100, Tier.T2: 16_000}
_MOST_BYTES = 64.0  # of memory for each request, at T2
_MOST_GROWTH = 48 * 2**20  # of memory, at T1, where the slope says nothing yet
_SAMPLE_EVERY = 100
_WORDS = ("once", "a", "little", "request", "went", "out", "to", "see", "what", "others", "had", "seen", "before", "it")


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = [*dict.fromkeys(_MIX), "samples of memory", *(["restarts"] if _LIVES[tier] > 1 else [])]
    tally = Tally("S1", tier, seed, _PLANNED[tier] + _LIVES[tier] - 1, forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    planned, lives, port = _PLANNED[tier], _LIVES[tier], 0
    seconds: list[float] = []
    with tiny_model() as model:
        for first, end in itertools.pairwise(planned * life // lives for life in range(lives + 1)):
            async with serving(model, port=port) as served:
                port = served.port
                life = await _live(tally, served, range(first, end), tier)
                seconds += life.seconds
                if end < planned:
                    with tally.case(f"restart after {end} requests"):
                        await kill(tally, served, "engine", "decode")
                        tally.event("restarts")
    tenth = max(len(seconds) // 10, 2)
    slow = [usual_slowest(part) for part in (seconds[:tenth], seconds[-tenth:])]
    if tier is Tier.T2 and slow[1] >= 1.2 * slow[0]:
        tally.fail(f"S1: the slowest of 100 took {slow[0]:.3f} s at first and {slow[1]:.3f} s at last")


async def _live(tally: Tally, served: Served, numbers: range, tier: Tier) -> _Life:
    """Requests of these numbers, with a look at all invariants from time to time."""
    watch = Watch(tally, served)
    await watch.begin()
    life = _Life(tally, watch, served)
    every = _CHECK_EVERY[tier]
    for part in (numbers[first : first + every] for first in range(0, len(numbers), every)):
        await life.send(iter(part))
        await watch.check(f"after {part[-1] + 1} requests")
    for fault in life.faults(tier):
        tally.fail(fault)
    return life


class _Life:
    """The requests of one server, and its memory meanwhile.

    Attributes:
        seconds: that normal requests took.
    """

    def __init__(self, tally: Tally, watch: Watch, served: Served) -> None:
        self.seconds: list[float] = []
        self._tally = tally
        self._watch = watch
        self._served = served
        self._pids = dict(zip(("front", "engine"), (process.pid for process in served.lasting()), strict=True))
        self._memory: dict[str, list[tuple[int, int]]] = {name: [] for name in self._pids}

    async def send(self, numbers: Iterator[int]) -> None:
        """Requests of these numbers, some at a time."""

        async def client() -> None:
            async with Connection(self._served.port) as connection:
                for number in numbers:
                    kind = self._tally.random.choice(_MIX)
                    with self._tally.case(f"{kind} {number}"):
                        await self._one(connection, kind, random.Random(number))
                        self._tally.event(kind)
                    if number % _SAMPLE_EVERY == 0:
                        for name, pid in self._pids.items():
                            self._memory[name].append((number, memory(pid)))
                        self._tally.event("samples of memory")

        await asyncio.gather(*(client() for _ in range(_TOGETHER)))

    async def _one(self, connection: Connection, kind: str, rng: random.Random) -> None:
        body: dict[str, Any] = {"prompt": " ".join(rng.choices(_WORDS, k=rng.randint(1, 12))), "max_tokens": 12}
        body |= {"seed": rng.randrange(2**40), "temperature": rng.choice([0, 1]), "ignore_eos": True}
        expected = 200
        if kind == "abort":
            await self._leave(body, rng.randint(0, 6))
            return
        if kind == "invalid":
            name, value = rng.choice(
                [("n", 0), ("prompt", [-1]), ("top_p", 2), ("stop", [""]), ("logit_bias", {"x": 1})]
            )
            body, expected = {**body, name: value}, 400
        elif kind == "grammar":
            body["guided_regex"] = rng.choice(["[a-f]+", f"({rng.choice(_WORDS)} ){{2}}", "(yes|no)"])
        elif kind == "several":
            body["n"] = 3
        elif kind == "over-long":
            body, expected = {**body, "prompt": "long " * 60}, 400
        began = time.monotonic()
        if kind == "normal" and rng.random() < 0.5:
            await self._stream(connection, body)
        else:
            reply = await connection.call("POST", "/v1/completions", body)
            self._watch.reply(kind, reply)
            self._tally.expect(reply.status == expected, f"{kind}: {body} gets {reply.status}: {reply.body!r:.200}")
            if reply.status == 200 and kind == "normal":
                used = reply.json["usage"]["completion_tokens"]
                self._tally.expect(used == 12, f"I12: {used} tokens of 12")
        if kind == "normal":
            self.seconds.append(time.monotonic() - began)

    async def _stream(self, connection: Connection, body: dict[str, Any]) -> None:
        told = Told()
        connection.send("POST", "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        await connection.follow(told)
        self._watch.reply("a normal stream", told)
        right = told.done and told.finish == {0: "length"} and (told.usage or {}).get("completion_tokens") == 12
        self._tally.expect(right, f"a normal stream gave {told}")

    async def _leave(self, body: dict[str, Any], events: int) -> None:
        async with Connection(self._served.port) as connection:
            connection.send("POST", "/v1/completions", {**body, "max_tokens": 80, "stream": True})
            told = Told()
            await connection.follow(told, events) if events else await asyncio.sleep(0.01)
            connection.reset()
            self._watch.reply("who leaves", told)

    def faults(self, tier: Tier) -> list[str]:
        """What grew."""
        found: list[str] = []
        for name, samples in self._memory.items():
            kept = [sample for sample in samples if sample[0] >= samples[0][0] + _WARM_UP[tier]]
            grown, slope = kept[-1][1] - kept[0][1], upper_slope(kept)
            if tier is Tier.T2 and slope >= _MOST_BYTES:
                found.append(f"S1: the {name} process grows by up to {slope:.0f} bytes a request")
            if tier is Tier.T1 and grown > _MOST_GROWTH:
                found.append(f"S1: the {name} process grew by {grown / 2**20:.0f} MiB")
        return found


def usual_slowest(seconds: Sequence[float]) -> float:
    """What the slowest of 100 takes: the median over windows, for what else a machine does comes and goes."""
    width = max(len(seconds) // 8, 2)
    windows = (seconds[first : first + width] for first in range(0, len(seconds) - width + 1, width))
    return statistics.median(statistics.quantiles(window, n=100)[98] for window in windows)


def memory(pid: int) -> int:
    """Bytes of a process's own that are in memory or swapped out."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE)) * 1024


def upper_slope(samples: Sequence[tuple[int, int]]) -> float:
    """The upper bound of the slope, at 95 %, of a line through samples of x and y."""
    xs, ys = zip(*samples, strict=True)
    line = statistics.linear_regression(xs, ys)
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    rest = sum((y - line.intercept - line.slope * x) ** 2 for x, y in samples)
    return line.slope + 1.96 * math.sqrt(rest / max(len(samples) - 2, 1) / spread)
