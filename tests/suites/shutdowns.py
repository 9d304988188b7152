"""K3: SIGTERM while 64 streams run. Each gets its end, nobody new is let in, and the exit code is 0."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

from tests.suites.raw_client import Connection, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, serving, until, until_true

# Seconds that running requests get, and after how many a second signal comes.
_CASES: tuple[tuple[float, float | None], ...] = ((0.0, None), (2.0, None), (30.0, 0.5))
_ROUNDS = {Tier.T1: 1, Tier.T2: 4}
_STREAMS = 64
# By when all must be over, behind the deadline.
_LATE = 5.0


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ("ended well after the signal", "cut off with an error", "refused after the signal", "second signals")
    tally = Tally("K3", tier, seed, len(_CASES) * _ROUNDS[tier], forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        for _ in range(_ROUNDS[tier]):
            await asyncio.gather(*(_one(tally, model, *case) for case in _CASES))


async def _one(tally: Tally, model: Path, deadline: float, second: float | None) -> None:
    label = f"{deadline:g} s" + ("" if second is None else ", twice")
    with tally.case(label):
        async with serving(model, "--drain-seconds", str(deadline)) as served:
            told = [Told() for _ in range(_STREAMS)]
            followers = [asyncio.create_task(_follow(served, one, number)) for number, one in enumerate(told)]

            async def runs() -> bool:
                return any(one.events > 3 for one in told)

            tally.expect(await until_true(runs, 20.0), f"{label}: no stream began")
            served.signal(signal.SIGTERM)
            before, sent = sum(one.ended for one in told), time.monotonic()
            await _refused(tally, served, label)
            if second is not None:
                await until(lambda: time.monotonic() - sent > second, second + 1)
                tally.expect(served.process.poll() is None, f"{label}: it did not wait for its streams")
                served.signal(signal.SIGTERM)
                tally.event("second signals")
            code = await served.exit_code((second or deadline) + 3 * _LATE)
            took = time.monotonic() - sent
            await asyncio.wait(followers, timeout=_LATE)
            tally.expect(code == 0, f"{label}: the exit code is {code}: {served.said[-300:]}")
            tally.expect(took <= (second or deadline) + _LATE, f"{label}: the end took {took:.1f} s")
            for one in told:
                tally.expect(one.ended, f"{label}: Q6: a stream ended with {one}")
                right = one.error is None or one.error["code"] == "shutting_down"
                tally.expect(right, f"{label}: a stream was told {one.error}")
                final = one.done or one.status == 503
                tally.expect(final, f"{label}: no [DONE] behind an error: {one}")
            tally.event("cut off with an error", sum(one.error is not None for one in told))
            if deadline:
                tally.event("ended well after the signal", sum(bool(one.finish) for one in told) - before)
            for fault in await served.left_faults():
                tally.fail(f"{label}: {fault}")
            tally.expect("Traceback" not in served.said, f"{label}: {served.said[-300:]}")


async def _follow(served: Served, told: Told, number: int) -> None:
    """Every other one is short."""
    body: dict[str, Any] = {"prompt": [number], "max_tokens": 20 if number % 2 else 240, "ignore_eos": True}
    async with Connection(served.port) as connection:
        connection.send("POST", "/v1/completions", {**body, "stream": True})
        await connection.follow(told)


async def _refused(tally: Tally, served: Served, label: str) -> None:
    """Nobody is let in after the signal: with 503 and a time to come again, or not even connected."""
    await asyncio.sleep(0.05)
    for path, body in (("/readyz", None), ("/v1/completions", {"prompt": "a", "max_tokens": 1})):
        try:
            reply = await ask(served.port, path, body)
        except (OSError, EOFError):
            tally.event("refused after the signal")
            continue
        refused = reply.status == 503 and "retry-after" in reply.headers
        tally.expect(refused, f"{label}: {path} answers {reply.status} after the signal")
        tally.event("refused after the signal", refused)
