"""K2: a process that hangs and does not die. The engine is ended at its deadline; a front that stood still goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from tests.suites.kills import ALL, first_text, serves, unready
from tests.suites.raw_client import Connection, Told
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import ENDED_SECONDS, UNREADY_SECONDS, Served, serving, until_true
from tests.suites.watch import Watch, judge

_ROUNDS = {Tier.T1: 1, Tier.T2: 10}
_STEP_SECONDS = {Tier.T1: 2.0, Tier.T2: 30.0}
# How far from its deadline the engine may be ended.
_TOLERANCE = 2.0
_STREAMS = 16


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ("engine stopped", "front stopped", "streams that were told", "ended at the deadline")
    tally = Tally("K2", tier, seed, 2 * _ROUNDS[tier], forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        for _ in range(_ROUNDS[tier]):
            await _round(tally, model, tier)


async def _round(tally: Tally, model: Path, tier: Tier) -> None:
    seconds = _STEP_SECONDS[tier]
    async with serving(model, "--step-seconds", str(seconds)) as served:
        watch = Watch(tally, served)
        await watch.begin(grammars=False)
        with tally.case("front"):
            await _front(tally, served, seconds)
            await watch.check("after the front stood still")
        with tally.case("engine"):
            await _engine(tally, served, seconds)
    if tier is Tier.T2:
        async with serving(model, port=served.port) as new:
            await serves(tally, new, await first_text(tally, new.port), ALL)


async def _front(tally: Tally, served: Served, seconds: float) -> None:
    """It stands still for longer than the deadline: the engine's silence was its own."""
    told, body = Told(), {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with Connection(served.port) as connection:
        connection.send("POST", "/v1/completions", body)
        await connection.follow(told, 5)
        judge(tally, "the front stands still", told)
        served.signal(signal.SIGSTOP)
        tally.event("front stopped")
        await asyncio.sleep(seconds + 1.0)
        served.signal(signal.SIGCONT)
    tally.expect(served.process.poll() is None, f"the server ended: {served.said[-300:]}")


async def _engine(tally: Tally, served: Served, seconds: float) -> None:
    port, engine = served.port, served.engine()
    if engine is None:
        raise RuntimeError("a ready server has no engine process")
    told = [Told() for _ in range(_STREAMS)]

    async def follow(one: Told) -> None:
        async with Connection(port) as connection:
            body = {"prompt": "a", "max_tokens": 240, "ignore_eos": True, "stream": True}
            connection.send("POST", "/v1/completions", body)
            await connection.follow(one)

    followers = [asyncio.create_task(follow(one)) for one in told]

    async def decodes() -> bool:
        return sum(one.events > 3 for one in told) >= 2

    tally.expect(await until_true(decodes, 20.0), "no stream began")
    engine.suspend()
    began = time.monotonic()
    tally.event("engine stopped")
    told_in_time = await until_true(lambda: unready(tally, port), UNREADY_SECONDS + 0.5)
    tally.expect(told_in_time, "Q7: still ready after 5 s")
    code = await served.exit_code(seconds + _TOLERANCE + ENDED_SECONDS)
    late = time.monotonic() - began - seconds
    tally.event("ended at the deadline", f"no sign of life for {seconds:g} s" in served.said)
    tally.expect(-1.0 <= late <= _TOLERANCE, f"the server ended {late:+.1f} s from the deadline")
    tally.expect(code == 1, f"the exit code is {code}: {served.said[-300:]}")
    _, waiting = await asyncio.wait(followers, timeout=ENDED_SECONDS)
    tally.expect(not waiting, f"Q7: {len(waiting)} streams have not ended")
    for one in told:
        judge(tally, "the engine stands still", one, injected=True)
        tally.expect(one.ended, f"Q6: a stream ended with {one}")
        tally.event("streams that were told", one.error is not None)
    for fault in await served.left_faults():
        tally.fail(fault)
