"""K3: SIGTERM while 64 streams run, once and twice. Each gets its end, nobody new is let in, the exit code is 0."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.suites.raw_client import Connection, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, serving, until, until_true
from tests.suites.watch import judge

# Seconds that running requests get, and how long after the first signal a second one comes.
_CASES: tuple[tuple[float, float | None], ...] = (
    *((0.0, None), (2.0, None), (30.0, 0.5)),
    *((0.0, 0.0), (2.0, 0.5), (30.0, None)),
)
_ROUNDS = {Tier.T1: 1, Tier.T2: 4}
# Servers beside each other; alone where their time is judged.
_TOGETHER = {Tier.T1: 3, Tier.T2: 1}
_STREAMS = 64
# Tokens of a long stream and of a short one; all are short where time enough is to be left for them.
_LONG, _SHORT = 240, 20
_ENOUGH = 30.0
# By when all must be over, behind the deadline; and how long it is waited for, as a busy machine may take longer.
_LATE, _PATIENCE = 5.0, 60.0


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["ended well after the signal", "cut off with an error", "refused after the signal", "second signals"]
    forced += ["all ended in good time"]
    tally = Tally("K3", tier, seed, len(_CASES) * _ROUNDS[tier], forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        for _ in range(_ROUNDS[tier]):
            for first in range(0, len(_CASES), _TOGETHER[tier]):
                beside = _CASES[first : first + _TOGETHER[tier]]
                await asyncio.gather(*(_one(tally, model, *case) for case in beside))


async def _one(tally: Tally, model: Path, deadline: float, second: float | None) -> None:
    label = f"{deadline:g} s" + ("" if second is None else ", twice")
    with tally.case(label):
        async with serving(model, "--drain-seconds", str(deadline)) as served:
            await _end(tally, served, label, deadline, second)


async def _end(tally: Tally, served: Served, label: str, deadline: float, second: float | None) -> None:
    """Ends a server while 64 streams run, and follows what clients see until nothing of it is left.

    Args:
        deadline: seconds that its running requests get.
        second: seconds until a second signal; None for none.
    """
    told = [Told() for _ in range(_STREAMS)]
    enough = deadline == _ENOUGH and second is None
    followers = [
        asyncio.create_task(_follow(served, one, number, _SHORT if enough or number % 2 else _LONG))
        for number, one in enumerate(told)
    ]

    async def runs() -> bool:
        return any(one.events > 3 for one in told)

    tally.expect(await until_true(runs, 20.0), f"{label}: no stream began")
    served.signal(signal.SIGTERM)
    before, sent = sum(one.ended for one in told), time.monotonic()
    if deadline or second is None:
        await _refused(tally, served, label)
    if second is not None:
        await _again(tally, served, sent + second, label, waits=bool(deadline))
    code = await served.exit_code(deadline + _PATIENCE)
    took, lasts = time.monotonic() - sent, deadline if second is None else second
    await asyncio.wait(followers, timeout=_LATE)
    tally.expect(code == 0, f"{label}: the exit code is {code}: {served.said[-300:]}")
    late = tally.tier is Tier.T2 and took > lasts + _LATE
    tally.expect(not late, f"{label}: the end took {took:.1f} s")
    _judge(tally, told, label)
    if cut := sum(one.error is not None for one in told):
        tally.event("cut off with an error", cut)
    if deadline:
        tally.event("ended well after the signal", sum(bool(one.finish) for one in told) - before)
    if second is not None or not deadline:
        tally.expect(cut > 0, f"{label}: nobody was cut off")
    if enough:
        tally.expect(not cut, f"{label}: {cut} streams were cut off that had time enough")
        tally.event("all ended in good time", not cut and before < _STREAMS)
    for fault in await served.left_faults():
        tally.fail(f"{label}: {fault}")
    tally.expect("Traceback" not in served.said, f"{label}: {served.said[-300:]}")


async def _follow(served: Served, told: Told, number: int, tokens: int) -> None:
    async with Connection(served.port) as connection:
        body = {"prompt": [number], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        connection.send("POST", "/v1/completions", body)
        await connection.follow(told)


async def _again(tally: Tally, served: Served, due: float, label: str, *, waits: bool) -> None:
    """A second signal, once the first has been heard and not before `due`; if `waits`, streams are to run until it."""
    tally.expect(await until(lambda: "Ending." in served.said, _LATE), f"{label}: it says nothing of its end")
    await until(lambda: time.monotonic() >= due, _LATE)
    is_alive = served.process.poll() is None
    tally.expect(is_alive or not waits, f"{label}: it did not wait for its streams")
    served.signal(signal.SIGTERM)
    tally.event("second signals", is_alive)


def _judge(tally: Tally, told: Sequence[Told], label: str) -> None:
    """Each stream knows how it ended, and why if it was cut off."""
    for one in told:
        judge(tally, label, one)
        tally.expect(one.ended, f"{label}: Q6: a stream ended with {one}")
        right = one.error is None or one.error["code"] == "shutting_down"
        tally.expect(right, f"{label}: a stream was told {one.error}")
        final = one.done or one.status == 503
        tally.expect(final, f"{label}: no [DONE] behind an error: {one}")


async def _refused(tally: Tally, served: Served, label: str) -> None:
    """Nobody is let in after the signal: with 503 and a time to come again, or not even connected."""
    await asyncio.sleep(0.05)
    for path, body in (("/readyz", None), ("/v1/completions", {"prompt": "a", "max_tokens": 1})):
        try:
            reply = await ask(served.port, path, body)
        except (OSError, EOFError):
            tally.event("refused after the signal")
            continue
        judge(tally, f"{label}: {path}", reply)
        refused = reply.status == 503 and "retry-after" in reply.headers
        tally.expect(refused, f"{label}: {path} answers {reply.status} after the signal")
        tally.event("refused after the signal", refused)
