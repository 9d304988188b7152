"""C2: clients that call their requests by the same name, by no name, and by names that break things."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.suites.raw_client import Connection, Reply, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import metric, metrics, serving
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 200, Tier.T2: 1_000}
# Pairs of ids of two requests at a time: equal ones, one that begins as the other does, none, long, unprintable.
_PAIRS: dict[str, tuple[str, str]] = {
    "equal": ("a", "a"),
    "beginning": ("request-1", "request-10"),
    "empty": ("", ""),
    "empty and one": ("", "a"),
    "like ours": ("cmpl-1", "1"),
    "of 256": ("x" * 256, "x" * 256),
    "of 257": ("x" * 257, "x" * 257),
    "of 1 MB": ("x" * 2**20, "x" * 2**20),
    "two lines": ("a\r\nX-Other: b", "a\n b"),
    "unicode": ("é\u202e", "日本"),
    "NUL": ("a\0b", "a"),
}
# Refused: too long for a label, for a head, or no printable ASCII.
_REFUSED = {"of 257": {400}, "of 1 MB": {431}, "two lines": {200, 400}, "unicode": {400}, "NUL": {200, 400}}
_TOGETHER = 8


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = [f"ids {kind}" for kind in _PAIRS] + ["served", "refused", "one of a pair left"]
    tally = Tally("C2", tier, seed, _PLANNED[tier], forced)
    asyncio.run(_run(tally, _PLANNED[tier]))
    return tally.report()


async def _run(tally: Tally, pairs: int) -> None:
    with tiny_model() as model:
        async with serving(model, "--log-requests") as served:
            watch = Watch(tally, served)
            await watch.begin(grammars=False)
            prompts = [f"Dear client {number}, " for number in range(2 * _TOGETHER)]
            alone = [await ask(served.port, "/v1/completions", _body(prompt)) for prompt in prompts]
            for reply in alone:
                watch.reply("alone", reply)
            due = [reply.text for reply in alone]
            for first in range(0, pairs, _TOGETHER):
                kinds = [list(_PAIRS)[number % len(_PAIRS)] for number in range(first, min(first + _TOGETHER, pairs))]
                await asyncio.gather(*(_pair(tally, watch, at, kind, prompts, due) for at, kind in enumerate(kinds)))
            await watch.check("at the end")
            came = metric(await metrics(served.port), "request_received_total")
            told = [line for line in served.said.splitlines() if " ended: " in line]
            tally.expect(len(told) == came, f"{came:g} requests came, and {len(told)} lines tell of them: {told[-3:]}")


def _body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}


async def _pair(tally: Tally, watch: Watch, at: int, kind: str, prompts: list[str], due: list[str]) -> None:
    """Two requests at a time. Where both are served, one of them may leave: the other must not notice."""
    tally.event(f"ids {kind}")
    leaves = kind not in _REFUSED and tally.random.random() < 0.3
    with tally.case(kind):
        replies = await asyncio.gather(
            *(_one(watch, prompts[2 * at + which], _PAIRS[kind][which], leaves and not which) for which in (0, 1))
        )
        for which, reply in enumerate(replies):
            if reply is None:
                tally.event("one of a pair left")
                continue
            watch.reply(f"ids {kind}", reply)
            tally.event("served" if reply.status == 200 else "refused")
            right = reply.status in _REFUSED.get(kind, {200})
            tally.expect(right, f"ids {kind}: the status is {reply.status}: {reply.body!r:.200}")
            if reply.status == 200:
                tally.expect(
                    reply.text == due[2 * at + which], f"ids {kind}: {reply.text!r}, alone {due[2 * at + which]!r}"
                )
            given = reply.headers.get("x-request-id", "")
            sound = given in ("", _PAIRS[kind][which].split("\r\n")[0])
            tally.expect(sound and "x-other" not in reply.headers, f"ids {kind}: the headers are {reply.headers}")


async def _one(watch: Watch, prompt: str, label: str, leaves: bool) -> Reply | None:
    """Its reply; None if it leaves at the first token."""
    async with Connection(watch.served.port) as connection:
        connection.send("POST", "/v1/completions", {**_body(prompt), "stream": leaves}, {"X-Request-Id": label})
        if leaves:
            told = Told()
            await connection.follow(told, 1)
            connection.reset()
            watch.reply(f"who leaves, id {label!r:.50}", told)
            return None
        return await connection.reply()
