"""C1: clients that leave, in every way and at every moment. What they held comes back, and the others never notice.

A tenth of them leaves streams whose tokens are drafted: from n-grams, and at T2 half of it by the tiny trained GLM.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.glm5_2.models import GOLDEN_MODEL
from tests.suites.raw_client import Connection, Reply, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, load, metric, metrics, serving, until_true
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 1_000, Tier.T2: 20_000}
_TOGETHER = 64
_WAYS = ("close", "reset", "half-close")
_MOMENTS = ("before the head", "after 1 token", "after k tokens", "not streamed")
# Of the aborts: those alone, each of which shows where it struck, and those of the model that drafts.
_ALONE, _DRAFTED = 0.06, 0.1
_NGRAM = ("--speculative-method", "ngram", "--num-speculative-tokens", "3")
_GLM = ("--num-speculative-tokens", "2", "--kv-cache-memory", "1MiB")
_PROMPTS = tuple(f"{number} little requests went out one day, " for number in range(1, 9))


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = [f"left {moment}" for moment in _MOMENTS] + [f"left by {way}" for way in _WAYS]
    forced += ["left in the queue", "left inside a prefill", "left while a grammar is compiled", "left with n > 1"]
    forced += ["preemptions", "survivors", "counted as client_gone", "released within 2 steps"]
    forced += ["left while preempted"]
    for drafter in ("n-gram", "GLM") if tier is Tier.T2 else ("n-gram",):
        forced += [f"left among drafts, {drafter}", f"accepted drafts, {drafter}"]
    tally = Tally("C1", tier, seed, _PLANNED[tier], forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    count = _PLANNED[tier]
    drafted = int(count * _DRAFTED)
    with tiny_model() as model:
        # Steps ahead, for only then there are any between an abort and the release of its blocks.
        async with serving(model, "--grammar-seconds", "0.5") as served:
            watch = Watch(tally, served)
            await watch.begin()
            before = await metrics(served.port)
            alone = int(count * _ALONE)
            await _alone(tally, served, alone)
            await watch.check("those alone")
            await _queued(tally, served)
            await watch.check("those in the queue")
            await _waves(watch, count - alone - _TOGETHER - drafted)
            after = await metrics(served.port)
            tally.event("preemptions", _grown(before, after, "num_preemptions_total"))
            gone = {"finished_reason": "client_gone"}
            tally.event("counted as client_gone", _grown(before, after, "request_success_total", **gone))
            tally.event("released within 2 steps", watch.released)
            tally.event("left while preempted", watch.left_preempted)
        of_glm = drafted // 2 if tier is Tier.T2 else 0  # its steps take long
        await _drafts(tally, "n-gram", model, _NGRAM, drafted - of_glm)
    if of_glm:
        await _drafts(tally, "GLM", GOLDEN_MODEL, _GLM, of_glm)


async def _drafts(tally: Tally, drafter: str, model: Path, options: Sequence[str], count: int) -> None:
    async with serving(model, *options) as served:
        watch = Watch(tally, served, slots=drafter != "n-gram")
        await watch.begin()
        before, left = await metrics(served.port), tally.cases
        await _waves(watch, count)
        after = await metrics(served.port)
        tally.event(f"accepted drafts, {drafter}", _grown(before, after, "spec_decode_num_accepted_tokens_total"))
        tally.event("released within 2 steps", watch.released)
        tally.event(f"left among drafts, {drafter}", tally.cases - left)


def _grown(before: str, after: str, name: str, **labels: str) -> int:
    return int(metric(after, name, **labels) - metric(before, name, **labels))


def _long(rng: random.Random) -> list[int]:
    """A prompt of several chunks that nobody has sent before."""
    return [rng.randrange(256) for _ in range(240)]


async def _alone(tally: Tally, served: Served, count: int) -> None:
    """One stream at a time, so that the metrics tell what the engine had done for it when it was left."""
    port, rng = served.port, tally.random
    pause = 0.01
    for number in range(count):
        compiles = number % 6 == 0
        body: dict[str, Any] = {"prompt": _long(rng), "max_tokens": 5, "ignore_eos": True, "stream": True}
        if compiles:
            body["guided_regex"] = f"(a|b{number}){{1,200}}c"
        with tally.case(f"alone {number}"):
            done = metric(await metrics(port), "iteration_tokens_total_sum")
            connection = Connection(port)
            await connection.open()
            connection.send("POST", "/v1/completions", body)
            await asyncio.sleep(0.005 if compiles else pause)
            connection.reset()
            tally.expect(await _rests(port), f"alone {number}: the load is {await load(port)}")
            made = metric(await metrics(port), "iteration_tokens_total_sum") - done
            tally.event("left while a grammar is compiled", compiles and not made)
            inside = not compiles and 0 < made < len(body["prompt"])
            tally.event("left inside a prefill", inside)
            if not compiles:  # on to where prefills end, from either side
                pause = max(0.001, pause * (0.8 if made >= len(body["prompt"]) else 1.2 if not made else 1.0))


async def _queued(tally: Tally, served: Served) -> None:
    """More streams than run at a time; those that wait leave."""
    port = served.port
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    connections = [Connection(port) for _ in range(_TOGETHER)]
    for connection in connections:
        await connection.open()
        connection.send("POST", "/v1/completions", body)

    async def full() -> bool:
        return (await load(port))["waiting"] > 0

    tally.expect(await until_true(full, 5.0), "no stream of 64 waits")
    waiting = (await load(port))["waiting"]
    # The last that came are the last to run.
    for connection in reversed(connections):
        tally.cases += 1
        connection.reset()
    tally.event("left in the queue", waiting)
    # How many steps it took is what the engine tells the watch.
    tally.expect(await _rests(port), f"the load behind {_TOGETHER} RSTs is {await load(port)}")


async def _rests(port: int) -> bool:
    async def holds() -> bool:
        return not any((await load(port)).values())

    return await until_true(holds, 2.0)


async def _waves(watch: Watch, count: int) -> None:
    """Waves of streams, of which a part survives and must say what it says alone."""
    tally, port, rng = watch.tally, watch.served.port, watch.tally.random
    kinds = [_kind(rng) for _ in range(12)]
    alone = [await _texts(watch, kind) for kind in kinds]
    left = wave = 0
    while left < count:
        leavers = min(count - left, _TOGETHER * 3 // 4)
        chosen = [rng.randrange(len(kinds)) for _ in range(_TOGETHER // 4)]
        works = [_survive(watch, kinds[number], alone[number]) for number in chosen]
        works += [_leave(watch, random.Random(rng.randrange(2**60))) for _ in range(leavers)]
        rng.shuffle(works)
        await asyncio.gather(*works)
        left, wave = left + leavers, wave + 1
        tally.expect(await watch.idle(), f"wave {wave}: I1: the load is {await load(port)}")
        if wave % 8 == 0 or left >= count:
            await watch.check(f"wave {wave}")


def _kind(rng: random.Random) -> dict[str, Any]:
    """A request that survives."""
    body: dict[str, Any] = {"prompt": rng.choice(_PROMPTS), "max_tokens": rng.choice([4, 16, 40]), "ignore_eos": True}
    choices: dict[str, Any] = {
        "n": 2, "temperature": 0.8, "logprobs": 2, "presence_penalty": 0.7, "stop": ["zq"], "guided_regex": "[a-z ]+",
    }  # fmt: skip
    body |= {name: choices[name] for name in rng.sample(sorted(choices), rng.randint(0, 2))}
    return {"temperature": 0, "seed": rng.randrange(2**40), **body}


async def _texts(watch: Watch, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice, not streamed."""
    reply = await ask(watch.served.port, "/v1/completions", body)
    watch.reply(f"{body}", reply)
    if reply.status != 200:
        raise RuntimeError(f"{body} is refused: {reply.body!r:.300}")
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json["choices"]]


async def _survive(watch: Watch, body: dict[str, Any], due: Sequence[tuple[str, str]]) -> None:
    tally, told = watch.tally, Told()
    async with Connection(watch.served.port) as connection:
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection.send("POST", "/v1/completions", sent)
        await connection.follow(told)
    watch.reply(f"{body}", told)
    found = [(told.text(index), told.finish.get(index)) for index in range(len(due))]
    tally.expect(found == list(due), f"{body} gives {found} among others, alone {due}: {told.error or told.broken}")
    used = (told.usage or {}).get("completion_tokens", 0)
    most = body["max_tokens"] * len(due)
    right = used == most or (0 < used < most and "stop" in told.finish.values())
    tally.expect(right, f"{body}: I12: the usage says {used} tokens")
    tally.event("survivors")


async def _leave(watch: Watch, rng: random.Random) -> None:
    """One that goes before it has got all."""
    tally, moment, way = watch.tally, rng.choice(_MOMENTS), rng.choice(_WAYS)
    n = rng.choice([1, 1, 1, 3])
    prompt: Any = rng.choice([rng.choice(_PROMPTS), _long(rng)])
    most = 30 if way == "half-close" else 150  # who only half leaves may get all of it
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12 if isinstance(prompt, list) else most, "n": n}
    if rng.random() < 0.15:
        body["guided_choice"] = [f"{rng.randrange(2**30)} apples", "none"]
    streamed = moment != "not streamed"
    began = time.monotonic()
    with tally.case(f"{moment}, {way}, {body!r:.200}"):
        connection, told = Connection(watch.served.port), Told()
        await connection.open()
        connection.send("POST", "/v1/completions", {**body, "ignore_eos": True, "stream": streamed})
        if moment.startswith("after"):
            events = n if moment == "after 1 token" else rng.randint(2, 9)
            await connection.follow(told, events)
            tally.expect(told.status in (0, 200), f"{moment}: {told}")
        else:
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.1]))
        await _go(watch, way, connection, told)
        watch.reply(f"left {moment} by {way}", told)
        tally.event(f"left {moment}")
        tally.event(f"left by {way}")
        tally.event("left with n > 1", n > 1)
        tally.expect(time.monotonic() - began < 30, f"{moment}: it took {time.monotonic() - began:.0f} s")


async def _go(watch: Watch, way: str, connection: Connection, told: Told) -> None:
    if way == "reset":
        connection.reset()
        return
    if way == "half-close":  # the server may end the answer, or end with it; it must not wait for more
        connection.half_close()
        if not told.status:  # no head of it has been read
            await asyncio.wait_for(connection.follow(told), 10.0)
        rest = await connection.drain(10.0)
        watch.reply("the rest for who left by half-close", Reply(told.status, told.headers, rest))
    connection.close()
