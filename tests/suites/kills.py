"""K1: each process killed at each moment. The truth is told fast, nothing is left, and the next server serves."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.suites.raw_client import Connection, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import (
    ENDED_SECONDS,
    PROBE,
    START_SECONDS,
    UNREADY_SECONDS,
    Served,
    launched,
    load,
    serving,
    until,
    until_true,
)
from tests.suites.watch import Watch, judge

_TARGETS = ("engine", "front")
_MOMENTS = ("start", "idle", "prefill", "decode", "drain")
# At T1 not all: the front's death is the same for the engine whatever it does, an idle engine's has nobody to tell, and
# one in a prefill is one in decode.
_CUT = {("front", "start"), ("front", "idle"), ("front", "prefill"), ("front", "drain")}
_CUT |= {("engine", "idle"), ("engine", "prefill")}
# Seconds from when the engine's process is there to the kill: at once, and while it loads.
_AT_START = {
    Tier.T1: (("engine", 1.0),),
    Tier.T2: tuple((target, wait) for target in _TARGETS for wait in (0.0, 1.0)),
}
_ROUNDS = {Tier.T1: 1, Tier.T2: 4}
# Requests that each new server answers; the one after an engine that died in decode answers them all.
ALL = 500
_SERVED = {Tier.T1: 20, Tier.T2: ALL}
_STREAMS = 16
_EXIT_CODES = {"engine": {1}, "front": {-signal.SIGKILL}}


def run(tier: Tier, seed: int) -> SuiteReport:
    cases = [(target, moment) for moment in _MOMENTS for target in _TARGETS]
    cases = [case for case in cases if tier is Tier.T2 or case not in _CUT]
    forced = [f"{target} killed in {moment}" for target, moment in cases] + [
        "streams that were told",
        "streams cut off",
    ]
    planned = (len([case for case in cases if case[1] != "start"]) + len(_AT_START[tier])) * _ROUNDS[tier]
    tally = Tally("K1", tier, seed, planned, [*forced, "served afterwards", "new servers looked at"])
    asyncio.run(_run(tally, cases, tier))
    return tally.report()


async def _run(tally: Tally, cases: Sequence[tuple[str, str]], tier: Tier) -> None:
    with tiny_model() as model:
        for _ in range(_ROUNDS[tier]):
            await asyncio.gather(
                _at_start(tally, model, _AT_START[tier], _SERVED[tier]),
                _one_after_the_other(tally, model, [case for case in cases if case[1] != "start"], _SERVED[tier]),
            )


async def _one_after_the_other(tally: Tally, model: Path, cases: Sequence[tuple[str, str]], count: int) -> None:
    """Each server takes the port of the one before it, and first shows that it serves."""
    port, due, after = 0, "", ("", "")
    for target, moment in cases:
        with tally.case(f"{target}, {moment}"):
            async with serving(model, port=port) as served:
                port = served.port
                due = due or await first_text(tally, port)
                await serves(tally, served, due, ALL if after == ("engine", "decode") else count)
                after = target, moment
                await kill(tally, served, target, moment)
    async with serving(model, port=port) as served:
        await serves(tally, served, due, count)
        served.signal(signal.SIGTERM)
        tally.expect(await served.exit_code(ENDED_SECONDS) == 0, "the last server did not end with 0")
        for fault in await served.left_faults():
            tally.fail(f"a server that ended well: {fault}")


async def first_text(tally: Tally, port: int) -> str:
    """What the probe gives, which all that come later must give."""
    reply = await ask(port, "/v1/completions", PROBE)
    judge(tally, "the first probe", reply)
    return reply.text


async def serves(tally: Tally, served: Served, due: str, count: int) -> None:
    """A server on the port of one that was killed answers, sixteen at a time; one that answers all is looked at too."""
    watch = Watch(tally, served) if count == ALL else None
    if watch is not None:
        await watch.begin(grammars=False)
    for first in range(0, count, _STREAMS):
        replies = await asyncio.gather(
            *(ask(served.port, "/v1/completions", PROBE) for _ in range(min(_STREAMS, count - first)))
        )
        for reply in replies:
            judge(tally, "a new server", reply)
        right = [reply.status == 200 and reply.text == due for reply in replies]
        tally.event("served afterwards", sum(right))
        tally.expect(all(right), f"{right.count(False)} of {len(right)} requests went wrong on a new server")
    if watch is not None:
        await watch.check("a new server")
        tally.event("new servers looked at")


async def _at_start(tally: Tally, model: Path, cases: Sequence[tuple[str, float]], count: int) -> None:
    """Behind each comes a server on the same port."""
    due = ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for target, wait in cases:
        label = f"{target}, start, {wait:g} s"
        with tally.case(label):
            async with launched(model, port=port) as served:
                await _kill_start(tally, served, target, wait, label)
            async with serving(model, port=port) as served:
                due = due or await first_text(tally, port)
                await serves(tally, served, due, count)


async def _kill_start(tally: Tally, served: Served, target: str, wait: float, label: str) -> None:
    await until(lambda: served.engine() is not None, START_SECONDS)
    await asyncio.sleep(wait)
    victim = served.engine()
    if victim is None or served.find_port():
        raise RuntimeError(f"there was nothing to kill: {served.said}")
    _strike(served, target, victim)
    tally.event(f"{target} killed in start")
    await _ends(tally, served, label, target)
    if target == "engine":
        clear = "Error: the engine process ended" in served.said and "Traceback" not in served.said
        tally.expect(clear, f"what is told of a killed engine: {served.said}")


def _strike(served: Served, target: str, engine: psutil.Process) -> None:
    engine.kill() if target == "engine" else served.signal(signal.SIGKILL)


async def kill(tally: Tally, served: Served, target: str, moment: str) -> None:
    """Kills it in the moment, and follows what clients see until nothing of the server is left."""
    port, label = served.port, f"{target}, {moment}"
    engine = served.engine()
    if engine is None:
        raise RuntimeError("a ready server has no engine process")
    told = [Told() for _ in range(0 if moment == "idle" else _STREAMS)]
    followers = [asyncio.create_task(_follow(port, one, number, moment)) for number, one in enumerate(told)]

    async def is_moment() -> bool:
        if moment == "prefill":
            return (await load(port))["running"] > 0
        return sum(one.events > 3 for one in told) >= _STREAMS // 4

    if moment != "idle":
        tally.expect(await until_true(is_moment, 20.0), f"{label}: the moment never came: {told}")
    if moment == "drain":
        served.signal(signal.SIGTERM)
        await until(lambda: "Ending." in served.said, 5.0)
    cut = sum(not one.ended for one in told)
    _strike(served, target, engine)
    killed = time.monotonic()
    if cut or moment == "idle":
        tally.event(f"{target} killed in {moment}")
    tally.expect(await until_true(lambda: unready(tally, port), UNREADY_SECONDS), f"{label}: Q7: still ready after 5 s")
    _, late = await asyncio.wait(followers, timeout=ENDED_SECONDS) if followers else ((), ())
    tally.expect(not late, f"{label}: Q7: {len(late)} streams have not ended after {time.monotonic() - killed:.0f} s")
    for one in told:
        judge(tally, label, one, injected=target == "engine")
        knows = one.ended or (target == "front" and one.broken != "")
        tally.expect(knows, f"{label}: Q6: a stream ended with {one}")
        if one.error is not None:
            tally.event("streams that were told")
        if one.broken:
            tally.event("streams cut off")
    await _ends(tally, served, label, target)


async def _follow(port: int, told: Told, number: int, moment: str) -> None:
    prompt = [number, *range(230)] if moment == "prefill" else [number]
    async with Connection(port) as connection:
        body = {"prompt": prompt, "max_tokens": 20 if moment == "prefill" else 240, "ignore_eos": True, "stream": True}
        connection.send("POST", "/v1/completions", body)
        await connection.follow(told)


async def unready(tally: Tally, port: int) -> bool:
    """Whether a server calls itself not ready, or is gone."""
    try:
        reply = await ask(port, "/readyz")
    except (OSError, EOFError):
        return True
    judge(tally, "while a process is lost", reply)
    return reply.status == 503


async def _ends(tally: Tally, served: Served, label: str, target: str) -> None:
    code = await served.exit_code(ENDED_SECONDS)
    tally.expect(code in _EXIT_CODES[target], f"{label}: the exit code is {code}: {served.said[-300:]}")
    for fault in await served.left_faults():
        tally.fail(f"{label}: {fault}")
