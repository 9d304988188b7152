"""F1: every value that breaks servers, in every field over HTTP, alone and in pairs: served or refused, never more."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.serving import values
from tests.suites.raw_client import Connection, Reply
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, serving
from tests.suites.watch import Watch
from tests.suites.watched_engine import AHEAD

_PLANNED = {Tier.T1: 2_000, Tier.T2: 100_000}
_CHECK_EVERY = {Tier.T1: 1_000, Tier.T2: 10_000}
_TOGETHER = 16
_SLOWEST = 5.0
# Stands for `values.DEEP`, which Python's own encoder cannot write.
_DEEP = "deep-" * 4
_DEEP_TEXT = '{"type":"array","items":' * 10_000 + '{"type":"object"}' + "}" * 10_000
# What is sound there is not what the tables' own door takes.
_OTHER = ("model", "chat_template_kwargs")
# Of the bodies, how many have one odd field, as long as there are such.
_SINGLE = 0.6
_ROUTES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "/v1/chat/completions": (values.CHAT, values.CHAT_BAD, values.CHAT_SOUND),
    "/v1/completions": (values.COMPLETIONS, values.COMPLETIONS_BAD, values.COMPLETIONS_SOUND),
}

Case = tuple[str, bytes, str]


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["served", "refused", "streams", "pairs of fields", "broken JSON"]
    tally = Tally("F1", tier, seed, _PLANNED[tier], forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        options = ("--grammar-seconds", "0.5", "--request-seconds", "60")
        async with serving(model, *options, environment={AHEAD: "1"}) as served:
            watch = Watch(tally, served)
            await watch.begin()
            cases = itertools.islice(_cases(tally.random, int(_SINGLE * _PLANNED[tier])), _PLANNED[tier])
            while part := list(itertools.islice(cases, _CHECK_EVERY[tier])):
                await _send(tally, watch, served, iter(part))
                await watch.check(f"after {tally.cases} bodies")


async def _send(tally: Tally, watch: Watch, served: Served, cases: Iterator[Case]) -> None:
    """Sixteen clients, each with one body after the other on its connection."""

    async def client() -> None:
        async with Connection(served.port) as connection:
            for path, body, kind in cases:
                label = f"{kind} {path} {body!r:.300}"
                with tally.case(label):
                    began = time.monotonic()
                    reply = await connection.call("POST", path, body)
                    _judge(tally, watch, label, kind, reply, time.monotonic() - began)
                    if reply.headers.get("connection") == "close":
                        connection.close()
                        await connection.open()

    await asyncio.gather(*(client() for _ in range(_TOGETHER)))


def _judge(tally: Tally, watch: Watch, label: str, kind: str, reply: Reply, seconds: float) -> None:
    watch.reply(label, reply)
    streams = reply.headers.get("content-type", "").startswith("text/event-stream")
    tally.expect(seconds < _SLOWEST, f"{label}: it took {seconds:.1f} s")
    tally.event("served" if reply.status == 200 else "refused")
    tally.event("streams", streams)
    tally.event("pairs of fields", kind == "pair")
    tally.event("broken JSON", kind == "broken")
    if reply.status != 200:
        error = reply.json["error"]
        whole = isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys()
        tally.expect(400 <= reply.status <= 429 or reply.status == 503, f"{label}: the status is {reply.status}")
        tally.expect(whole, f"{label}: the error is {error}")
    if kind in ("bad", "broken"):
        tally.expect(reply.status in (400, 404, 413), f"{label}: must be refused, and is {reply.status}")
    if kind == "sound":
        tally.expect(reply.status == 200, f"{label}: must be served, and is {reply.status}: {reply.body!r:.200}")
    if streams:
        tally.expect(reply.body.endswith(b"data: [DONE]\n\n"), f"{label}: the stream ends with {reply.body[-100:]!r}")
        tally.expect(
            b'"finish_reason":"' in reply.body or b'"error"' in reply.body, f"{label}: a stream without an end"
        )
    elif reply.status == 200:
        answer = reply.json
        ended = all(choice["finish_reason"] for choice in answer["choices"])
        tally.expect(ended, f"{label}: no finish reason in {reply.body!r:.200}")


def _cases(rng: random.Random, most: int) -> Iterator[Case]:
    """Single values of each field, at most so many, then pairs of fields; endless."""
    singles = [*_singles(), *_broken()]
    rng.shuffle(singles)
    yield from singles[:most]
    made = [values.bodies(base, bad, sound, rng.randrange(2**40)) for base, bad, sound in _ROUTES.values()]
    while True:
        for path, bodies in zip(_ROUTES, made, strict=True):
            yield path, encode({"max_tokens": 6, "stream": rng.random() < 0.3, **next(bodies)}), "pair"


def _singles() -> Iterator[Case]:
    for path, (base, bad, sound) in _ROUTES.items():
        for kind, table in (("bad", bad), ("sound", sound)):
            for name, known in table.items():
                for value in known:
                    body = {"max_tokens": 6, **base, name: value}
                    yield path, encode(body), "any" if kind == "sound" and name in _OTHER else kind
        for name in sorted({*bad, *sound}):
            if name == "prompt" or name == "messages":
                continue
            for value in (None, 2**63, 1e308, float("nan"), "", [], {}, "\ud800"):
                yield path, encode({"max_tokens": 6, **base, name: value}), "any"


def _broken() -> Iterator[Case]:
    """What is no JSON, or could be read in two ways."""
    texts: Iterable[bytes] = (
        *(b"", b" ", b"null", b"[]", b"5", b'"a"', b"{", b"{}{}", b"{'a': 1}", b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
        *(b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "\\u0070rompt": "b"}', b'{"prompt": "\xff"}'),
        *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a",}'),
        *(b'{"prompt": "a", "n": 01}', b'{"prompt": "a", "n": 1e}', b"[" * 100_000, b'{"a":' * 100_000),
        b'{"prompt": "' + b"\\" * 99_999 + b'"}',
        b"{" + b",".join(b'"a":1' for _ in range(100_000)) + b"}",
    )
    for path in (*_ROUTES, "/tokenize", "/detokenize"):
        for text in texts:
            yield path, text, "broken"


def encode(body: object) -> bytes:
    """As JSON, with what only a hostile client writes: NaN, halves of surrogate pairs, ten thousand levels."""
    return json.dumps(_marked(body)).replace(f'"{_DEEP}"', _DEEP_TEXT).encode()


def _marked(value: Any) -> Any:
    if value is values.DEEP:
        return _DEEP
    if isinstance(value, dict):
        return {name: _marked(item) for name, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list) else value
