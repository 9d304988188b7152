"""F1: every value that breaks servers, in every field over HTTP, alone and in pairs: served or refused, never more."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.serving import values
from tests.suites.raw_client import Connection, Reply
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import Served, serving
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 2_000, Tier.T2: 100_000}
_CHECK_EVERY = {Tier.T1: 1_000, Tier.T2: 10_000}
_TOGETHER = 16
# Seconds of a body; and tokens a second, of which those that others ask for have to be made first: one sound body can
# ask for 256 times 250, which fill the cache many times over.
_SLOWEST, _SLOWEST_TOKENS = 5.0, 1_000
# Stands for `values.DEEP`, which Python's own encoder cannot write.
_DEEP = "deep-" * 4
_DEEP_TEXT = '{"type":"array","items":' * 10_000 + '{"type":"object"}' + "}" * 10_000
# What is sound there is not what the tables' own door takes.
_OTHER = ("model", "chat_template_kwargs")
# Of the bodies, how many have one odd field, as long as there are such.
_SINGLE = 0.6
# What every field is sent, beside what its own tables have.
_EVERYWHERE: Mapping[Tier, Sequence[object]] = {
    Tier.T1: (None, 2**63, 1e308, float("nan"), "", [], {}, "\ud800"),
    Tier.T2: values.ANY,
}
# Fields that may ask for a grammar: only these wait for its compiler, which may have too much to do.
_GRAMMARS = {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
_GRAMMARS |= {"tools", "tool_choice"}
_MOST_BUSY = 0.01  # of all answers
_ROUTES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "/v1/chat/completions": (values.CHAT, values.CHAT_BAD, values.CHAT_SOUND),
    "/v1/completions": (values.COMPLETIONS, values.COMPLETIONS_BAD, values.COMPLETIONS_SOUND),
}


class Case(NamedTuple):
    """A body.

    Attributes:
        path: where it is sent.
        sent: its bytes.
        kind: `bad` ones must be refused and `sound` ones served, `any` and a `pair` may be either; `broken` is no JSON.
        fields: whose values are not the usual ones.
        table: of a single field, the table that its value is of; "" for all else.
        place: of that value in the table.
    """

    path: str
    sent: bytes
    kind: str
    fields: frozenset[str] = frozenset()
    table: str = ""
    place: int = 0


class _Answered(NamedTuple):
    """What came of a body: from when to when, and how many tokens it got."""

    label: str
    began: float
    ended: float
    tokens: int


class _Coverage:
    """What was sent: values of single fields, and pairs of fields; of each route."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._sent: set[tuple[object, ...]] = set()

    def note(self, case: Case) -> None:
        """A body was answered."""
        self._sent |= self._shown(case)

    def judge(self, tally: Tally) -> None:
        """At T2 all must have been sent: every value, every pair; at T1 something odd in each field."""
        due = set[tuple[object, ...]]()
        for case in _singles(self._tier):
            due |= self._shown(case)
        if self._tier is Tier.T2:
            due |= {
                ("pair", path, *pair)
                for path, (_, *tables) in _ROUTES.items()
                for pair in itertools.combinations(sorted({name for table in tables for name in table}), 2)
            }
        for kind in ("field", "value", "pair"):
            wanted, found = ({what for what in some if what[0] == kind} for some in (due, self._sent))
            if found:
                tally.event(f"different {kind}s", len(found))
            missing = sorted(map(str, wanted - found))
            tally.expect(not missing, f"{len(missing)} {kind}s of {len(wanted)} were never sent: {missing[:5]}")

    def _shown(self, case: Case) -> set[tuple[object, ...]]:
        if case.kind == "pair":
            return {("pair", case.path, *pair) for pair in itertools.combinations(sorted(case.fields), 2)}
        shown: set[tuple[object, ...]] = set()
        for field in case.fields:
            if case.table != "sound":
                shown.add(("field", case.path, field))
            if self._tier is Tier.T2:
                shown.add(("value", case.path, field, case.table, case.place))
        return shown


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["served", "refused", "streams", "pairs of fields", "broken JSON"]
    tally = Tally("F1", tier, seed, _PLANNED[tier], forced)
    asyncio.run(_run(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        options = ("--grammar-seconds", "0.5", "--request-seconds", "60")
        async with serving(model, *options) as served:
            watch, coverage = Watch(tally, served), _Coverage(tier)
            await watch.begin()
            cases = itertools.islice(_cases(tally.random, tier), _PLANNED[tier])
            while part := list(itertools.islice(cases, _CHECK_EVERY[tier])):
                await _send(tally, watch, served, iter(part), coverage)
                await watch.check(f"after {tally.cases} bodies")
            coverage.judge(tally)
            busy = tally.events["busy"]
            tally.expect(busy < _MOST_BUSY * tally.cases, f"{busy} of {tally.cases} bodies were refused with 503")


async def _send(tally: Tally, watch: Watch, served: Served, cases: Iterator[Case], coverage: _Coverage) -> None:
    """Sixteen clients, each with one body after the other on its connection."""
    answered = list[_Answered]()

    async def client() -> None:
        async with Connection(served.port) as connection:
            for case in cases:
                label = f"{case.kind} {case.path} {case.sent!r:.300}"
                with tally.case(label):
                    began = time.monotonic()
                    reply = await connection.call("POST", case.path, case.sent)
                    answered.append(_Answered(label, began, time.monotonic(), _tokens(reply)))
                    coverage.note(case)
                    _judge(tally, watch, label, case, reply)
                    if reply.headers.get("connection") == "close":
                        connection.close()
                        await connection.open()

    await asyncio.gather(*(client() for _ in range(_TOGETHER)))
    _judge_times(tally, answered)


def _is_stream(reply: Reply) -> bool:
    return reply.headers.get("content-type", "").startswith("text/event-stream")


def _tokens(reply: Reply) -> int:
    """How many tokens an answer has; of a stream, how many events."""
    if reply.status != 200:
        return 0
    if _is_stream(reply):
        return reply.body.count(b"data: ")
    tokens: int = reply.json["usage"]["completion_tokens"]
    return tokens


def _judge_times(tally: Tally, answered: Sequence[_Answered]) -> None:
    """No body may take longer than its own answer and those of the others at the time let it."""
    for label, began, ended, _ in answered:
        if ended - began < _SLOWEST:
            continue
        beside = sum(other.tokens for other in answered if other.began < ended and other.ended > began)
        tally.event("late behind many tokens")
        most = _SLOWEST + beside / _SLOWEST_TOKENS
        tally.expect(ended - began < most, f"{label}: it took {ended - began:.1f} s beside {beside:,} tokens")


def _judge(tally: Tally, watch: Watch, label: str, case: Case, reply: Reply) -> None:
    watch.reply(label, reply)
    kind = case.kind
    streams = _is_stream(reply)
    tally.event("served" if reply.status == 200 else "refused")
    tally.event("streams", streams)
    tally.event("pairs of fields", kind == "pair")
    tally.event("broken JSON", kind == "broken")
    if reply.status != 200:
        error = reply.json["error"]
        whole = isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys()
        tally.expect(whole, f"{label}: the error is {error}")
        if reply.status == 503:
            tally.event("busy")
            tally.expect(not _GRAMMARS.isdisjoint(case.fields), f"{label}: is refused with 503 without a grammar")
        else:
            tally.expect(400 <= reply.status <= 429, f"{label}: the status is {reply.status}")
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


def _cases(rng: random.Random, tier: Tier) -> Iterator[Case]:
    """What is no JSON; single values, as many of one field as of another while it has some; then pairs, endless."""
    broken, singles = [*_broken()], [*_singles(tier)]
    rng.shuffle(singles)
    turns: defaultdict[tuple[object, ...], Iterator[int]] = defaultdict(itertools.count)
    singles.sort(key=lambda case: next(turns[case.path, case.fields]))
    singles = broken + singles[: int(_SINGLE * _PLANNED[tier]) - len(broken)]
    rng.shuffle(singles)
    yield from singles
    made = [values.bodies(base, bad, sound, rng.randrange(2**40)) for base, bad, sound in _ROUTES.values()]
    while True:
        for (path, (base, _, _)), bodies in zip(_ROUTES.items(), made, strict=True):
            body = next(bodies)
            odd = frozenset(name for name, value in body.items() if name not in base or value is not base[name])
            yield Case(path, encode({"max_tokens": 6, "stream": rng.random() < 0.3, **body}), "pair", odd)


def _singles(tier: Tier) -> Iterator[Case]:
    for path, (base, bad, sound) in _ROUTES.items():
        usual = {"max_tokens": 6, **base}
        every = dict.fromkeys(sorted({*bad, *sound}), _EVERYWHERE[tier])
        for table, known in (("bad", bad), ("sound", sound), ("any", every)):
            for name, some in known.items():
                kind = "any" if table == "sound" and name in _OTHER else table
                for place, value in enumerate(some):
                    yield Case(path, encode({**usual, name: value}), kind, frozenset([name]), table, place)
        for name in base:
            body = {other: value for other, value in usual.items() if other != name}
            yield Case(path, encode(body), "bad", frozenset([name]), "absent")


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
            yield Case(path, text, "broken")


def encode(body: object) -> bytes:
    """As JSON, with what only a hostile client writes: NaN, halves of surrogate pairs, ten thousand levels."""
    return json.dumps(_marked(body)).replace(f'"{_DEEP}"', _DEEP_TEXT).encode()


def _marked(value: Any) -> Any:
    if value is values.DEEP:
        return _DEEP
    if isinstance(value, dict):
        return {name: _marked(item) for name, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list) else value
