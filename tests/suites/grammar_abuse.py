"""G1: grammars that break compilers. Each is compiled or refused within its limits, by a process that stays.

Each one is a fork of that process, with limits of its own, which takes some 15 ms; at T2 two such processes work beside
each other, on a processor each.

Then two clients ask a server for them, beside streams of others. At T2 the time between the tokens of these is taken in
windows beside hostile grammars and, by turns, beside sound ones, and the medians of the windows' means are compared:
single windows tell of what else the machine does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tokenizers
import torch

from hookline.errors import InvalidRequestError
from hookline.grammar import GrammarKind, GrammarSpec
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts
from hookline.serving.requests.grammars import GrammarCompiler
from hookline.structured_output import CompiledGrammar, GrammarVocabulary
from hookline.tokenizer import Tokenizer
from tests.source_tree import ROOT
from tests.suites.beside import several, watched
from tests.suites.raw_client import Connection, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.watch import Watch

_MODEL = ROOT / "tests" / "data" / "tiny-glm5.2-mtp"
_VOCABULARY, _END = 8192, 8175
_GENERATED = {Tier.T1: 200, Tier.T2: 20_000}
# Far more time than it takes to run out of memory, on a slow processor too: one refusal must not come as the other.
_LIMITS = Limits(grammar_seconds=1.0, grammar_memory=128 * 2**20)
# By the clock, of a processor that has other things to do.
_SECONDS, _STEP_SECONDS = 8.0, 0.5
_MOST_CHARACTERS = 500
# Over HTTP: streams of others, the clients, their pauses and how long a window is, all in seconds, how often all of the
# grammars come, and what one may take. The pool has room for all.
_STREAMS, _CLIENTS, _PAUSE, _WINDOW = 8, 2, 0.1, 4.0
_ROUNDS = 2
_ROOM = ("--kv-cache-memory", "2MiB")
_STREAM: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
_SLOWER = 1.5


def run(tier: Tier, seed: int) -> SuiteReport:
    outcomes = ("compiled", "refused", "out of time", "out of memory")
    forced = [*outcomes, "generated and compiled", "generated and refused"]
    forced += [*(f"over HTTP: {outcome}" for outcome in outcomes), "over HTTP: streams of others"]
    planned = len(_HOSTILE) + _GENERATED[tier] + len(_sent(tier))
    tally = Tally("G1", tier, seed, planned, forced)
    asyncio.run(_run(tally, tier))
    asyncio.run(_over_http(tally, tier))
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(_MODEL / "tokenizer.json")))
    vocabulary = GrammarVocabulary(tokenizer, _VOCABULARY, [_END])
    async with _compiling(tally) as compiler:
        for name, kind, source in _HOSTILE:
            with tally.case(name):
                answer = await _ask(tally, compiler, name, GrammarSpec(kind, source))
                _judge_hostile(tally, name, answer, vocabulary)
        sources = (json.dumps(_random_schema(tally.random)) for _ in range(_GENERATED[tier]))
        if tier is Tier.T1:
            await _compile_generated(tally, compiler, sources)
            return
        async with _compiling(tally) as second:
            await asyncio.gather(*(_compile_generated(tally, each, sources) for each in (compiler, second)))


@asynccontextmanager
async def _compiling(tally: Tally) -> AsyncIterator[GrammarCompiler]:
    """A compiler, whose process must stay the same until the end, and then must go."""
    compiler = GrammarCompiler(facts(), _LIMITS)
    try:
        await compiler.start()
        process = compiler._process
        yield compiler
        tally.expect(compiler._process is process is not None, "the process that compiles was replaced")
    finally:
        await compiler.close()
    tally.expect(process is not None and process.returncode is not None, "the process that compiles is left")


async def _compile_generated(tally: Tally, compiler: GrammarCompiler, sources: Iterator[str]) -> None:
    for source in sources:
        with tally.case(source):
            answer = await _ask(tally, compiler, source, GrammarSpec("json_schema", source))
            tally.event("generated and refused" if isinstance(answer, str) else "generated and compiled")
            limited = isinstance(answer, str) and ("takes more" in answer or "memory" in answer)
            tally.expect(not limited, f"{source}: {answer!r}")


async def _ask(tally: Tally, compiler: GrammarCompiler, name: str, spec: GrammarSpec) -> bytes | str:
    """The compiled grammar, or why there is none; within the limits."""
    begin = time.monotonic()
    answer: bytes | str
    try:
        answer = await compiler.compile(spec)
    except InvalidRequestError as error:
        answer = error.message
    seconds = time.monotonic() - begin
    tally.expect(seconds < _SECONDS, f"{name}: it took {seconds:.1f} s")
    kept = compiler.kept_bytes
    tally.expect(kept <= _LIMITS.grammar_cache_bytes, f"{name}: {kept:,} bytes are kept")
    tally.expect(isinstance(answer, bytes) or len(answer) < _MOST_CHARACTERS, f"{name}: it tells {answer!r:.600}")
    return answer


def _judge_hostile(tally: Tally, name: str, answer: bytes | str, vocabulary: GrammarVocabulary) -> None:
    if isinstance(answer, str):
        tally.event("refused")
        tally.event("out of time", "it takes more than 1 s" in answer)
        tally.event("out of memory", "memory" in answer)
        tally.expect(name not in _TAKEN, f"{name}: it is refused: {answer}")
        return
    tally.event("compiled")
    tally.expect(name not in _REFUSED, f"{name}: it is taken")
    most = _LIMITS.grammar_cache_bytes // 16
    tally.expect(len(answer) <= most, f"{name}: it has {len(answer):,} bytes")
    _use(tally, name, answer, vocabulary)


def facts(**changes: Any) -> Facts:
    """Of a model with the tokenizer of the tiny GLM."""
    known: dict[str, Any] = dict.fromkeys(("name", "architecture", "plugin", "device", "dtype"), "tiny")
    counts = ("max_model_len", "block_size", "num_blocks", "max_running", "max_batch_tokens")
    known |= dict.fromkeys(counts, 1) | {"prefix_caching": False, "special_tokens": {}, "eos_token_ids": [_END]}
    tokenizer = (_MODEL / "tokenizer.json").read_bytes()
    return Facts(**known | {"vocab_size": _VOCABULARY, "tokenizer_json": tokenizer} | changes)


def _use(tally: Tally, name: str, data: bytes, vocabulary: GrammarVocabulary) -> None:
    """Random steps of an output that is held to a grammar: none takes long."""
    matcher = CompiledGrammar.from_bytes(data, vocabulary).matcher()
    mask, rng = torch.zeros((1, _VOCABULARY // 32), dtype=torch.int32), tally.random
    for _ in range(30):
        begin = time.thread_time()
        matcher.fill(mask, ())
        seconds = time.thread_time() - begin
        tally.expect(seconds < _STEP_SECONDS, f"{name}: a step took {seconds:.1f} s")
        words = [(word, bits) for word, bits in enumerate(mask[0].tolist()) if bits]
        if not words:
            return
        word, bits = rng.choice(words)
        matcher.accept(32 * word + rng.choice([bit for bit in range(32) if bits >> bit & 1]))
        if matcher.is_finished:
            return


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _schema(**fields: Any) -> str:
    return json.dumps(fields)


def _doubling(depth: int) -> str:
    """Each definition names the next one twice."""
    defs: dict[str, Any] = {f"d{depth}": {"type": "integer"}}
    for level in range(depth):
        twice = {name: {"$ref": f"#/$defs/d{level + 1}"} for name in "ab"}
        defs[f"d{level}"] = {"type": "object", "properties": twice}
    return _schema(**{"$ref": "#/$defs/d0", "$defs": defs})


@dataclass(frozen=True, slots=True)
class _Sent:
    """A grammar as a client sends it.

    Attributes:
        due: the statuses that it may get, beside 503 where the compiler has too much to do.
    """

    name: str
    body: bytes
    due: tuple[int, ...]


@dataclass(slots=True)
class _Timed(Told):
    """A stream that notes the seconds between its events."""

    gaps: list[float] = field(default_factory=list)
    last: float = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self.last:
            self.gaps.append(now - self.last)
        self.last = now
        Told.take(self, event)  # `super()` does not know a class that was made anew for its slots


async def _over_http(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model:
        async with watched(tally, model, *_ROOM) as watch, _streams(tally, watch) as gaps:
            if tier is Tier.T1:
                await several(_CLIENTS, partial(_send, tally, watch), _sent(tier))
            else:
                await _compare(tally, watch, gaps, _sent(tier))


@asynccontextmanager
async def _streams(tally: Tally, watch: Watch) -> AsyncIterator[list[float]]:
    """Streams of others that run on and on, each as it runs alone; the seconds between their tokens, as they come."""
    port, gaps, over = watch.served.port, list[float](), asyncio.Event()
    every = [{**_STREAM, "prompt": f"{number} little grammars, "} for number in range(_STREAMS)]
    replies = await asyncio.gather(*(ask(port, "/v1/completions", body) for body in every))
    for reply in replies:
        watch.reply("another, alone", reply)
    alone = [reply.text for reply in replies]

    async def run_on(body: Mapping[str, Any], due: str) -> None:
        while not over.is_set():
            told = _Timed(gaps=gaps)
            async with Connection(port) as connection:
                connection.send("POST", "/v1/completions", {**body, "stream": True})
                await connection.follow(told)
            watch.reply("another's stream", told)
            whole = (told.text(), told.finish) == (due, {0: "length"})
            tally.expect(whole, f"another's stream is {told}, alone {due!r}")
            tally.event("over HTTP: streams of others")

    tasks = [asyncio.create_task(run_on(body, due)) for body, due in zip(every, alone, strict=True)]
    try:
        yield gaps
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def _send(tally: Tally, watch: Watch, sent: _Sent) -> None:
    with tally.case(f"over HTTP: {sent.name}"):
        reply = await ask(watch.served.port, "/v1/completions", sent.body)
        watch.reply(f"over HTTP: {sent.name}", reply)
        told = f"over HTTP: {sent.name}: {reply.status} in place of {sent.due}: {reply.body!r:.300}"
        tally.expect(reply.status in (*sent.due, 503) and len(reply.body) < 4 * _MOST_CHARACTERS, told)
        tally.event("over HTTP: compiled", reply.status == 200)
        tally.event("over HTTP: refused", reply.status == 400)
        tally.event("over HTTP: out of time", b"it takes more than" in reply.body)
        tally.event("over HTTP: out of memory", b"memory" in reply.body)


async def _compare(tally: Tally, watch: Watch, gaps: list[float], hostile: list[_Sent]) -> None:
    """Windows beside sound and hostile grammars by turns, until all of the hostile ones have come."""
    tally.random.shuffle(hostile)
    sound = itertools.cycle([_Sent(name, _body(kind, source)[0], (200,)) for name, kind, source in _SOUND])
    rest, means = iter(hostile), dict[bool, list[float]]({False: [], True: []})

    async def send(sent: _Sent) -> None:
        await _send(tally, watch, sent)
        await asyncio.sleep(_PAUSE)

    while (first := next(rest, None)) is not None:
        for is_hostile, source in ((False, sound), (True, itertools.chain([first], rest))):
            gaps.clear()
            await several(_CLIENTS, send, _until(time.monotonic() + _WINDOW, source))
            means[is_hostile].append(statistics.fmean(gaps))
    beside, usual = (statistics.median(means[is_hostile]) for is_hostile in (True, False))
    told = f"between tokens of others are {beside:.4f} s beside hostile grammars, and {usual:.4f} s beside sound ones"
    tally.expect(beside < _SLOWER * usual, told)


def _until(deadline: float, source: Iterator[_Sent]) -> Iterator[_Sent]:
    while time.monotonic() < deadline and (sent := next(source, None)) is not None:
        yield sent


def _sent(tier: Tier) -> list[_Sent]:
    """The hostile grammars in every way in which they can be sent, as often as they are; at T1 a few of them once."""
    every = [
        _Sent(name, body, (400,) if name in _REFUSED else (200,) if name in _TAKEN else (200, 400))
        for name, kind, source in _HOSTILE
        for body in _body(kind, source)
    ]
    if tier is Tier.T2:
        return every * _ROUNDS
    return [next(sent for sent in every if sent.name == name) for name in _FEW]


def _body(kind: GrammarKind, source: str) -> list[bytes]:
    """The bodies that a grammar can stand in: as JSON, which it may break, or as text."""
    text = json.dumps(source)
    fields = {
        "json_schema": [
            f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {source}}}}}',
            f'"structured_outputs": {{"json": {text}}}',
        ],
        "regex": [f'"structured_outputs": {{"regex": {text}}}'],
        "ebnf": [f'"structured_outputs": {{"grammar": {text}}}'],
        "choice": [f'"structured_outputs": {{"choice": {source}}}'],
        "structural_tag": [f'"response_format": {source}'],
    }[kind]
    return [f'{{"prompt": "Now: ", "max_tokens": 30, "seed": 1, {part}}}'.encode() for part in fields]


_PATTERN = {"type": "string", "pattern": "^(a|b|c){9999}$"}
_HOSTILE: list[tuple[str, GrammarKind, str]] = [
    ("nested 10,000 deep", "json_schema", _nested(10_000)),
    ("nested 200 deep", "json_schema", _nested(200)),
    ("brackets", "json_schema", "[" * 60_000),
    ("a huge enum", "json_schema", _schema(enum=[f"{'x' * 50}{i}" for i in range(100_000)])),
    ("a large enum", "json_schema", _schema(enum=[f"v{i}" for i in range(4000)])),
    ("a reference to itself", "json_schema", _schema(**{"$ref": "#"})),
    ("references in a circle", "json_schema", '{"$ref":"#/a","a":{"$ref":"#/b"},"b":{"$ref":"#/a"}}'),
    ("without an end", "json_schema", _schema(type="object", properties={"a": {"$ref": "#"}}, required=["a"])),
    ("from elsewhere", "json_schema", _schema(**{"$ref": "https://example.com/schema"})),
    ("doubling", "json_schema", _doubling(40)),
    ("impossible bounds", "json_schema", _schema(type="array", minItems=5, maxItems=2)),
    ("impossible number", "json_schema", _schema(type="integer", minimum=5, maximum=2)),
    ("nothing", "json_schema", "false"),
    ("no schema", "json_schema", "3"),
    ("no number", "json_schema", '{"type": "number", "minimum": NaN}'),
    ("beyond numbers", "json_schema", '{"type": "number", "minimum": 1e400}'),
    ("a huge number", "json_schema", _schema(type="integer", minimum=-(10**30), maximum=10**300)),
    ("many items", "json_schema", _schema(type="array", minItems=10**5, maxItems=10**6, items={"type": "integer"})),
    ("a long text", "json_schema", _schema(type="string", minLength=60_000, maxLength=10**9)),
    ("many properties", "json_schema", _schema(type="object", properties={f"p{i}": {} for i in range(2000)})),
    ("repeated pattern", "json_schema", _schema(type="string", pattern="(a{1,300}){1,300}")),
    ("a multiple", "json_schema", _schema(type="integer", multipleOf=99_991)),
    ("patterns in a row", "json_schema", _schema(type="array", prefixItems=[_PATTERN] * 900)),
    ("stars in a row", "ebnf", "root ::= " + '"a"* ' * 12_000),
    ("(a+)+b", "regex", "(a+)+b"),
    ("((a*)*)*b", "regex", "((a*)*)*b"),
    ("a{1,100000}", "regex", "a{1,100000}"),
    ("(a{1,1000}){1,1000}", "regex", "(a{1,1000}){1,1000}"),
    (".{1,65535}", "regex", ".{1,65535}"),
    ("(.*a){50}", "regex", "(.*a){50}"),
    ("a? many times", "regex", "a?" * 3000 + "a" * 3000),
    ("alternatives", "regex", "|".join(f"x{i}" for i in range(9000))),
    ("parentheses", "regex", "(" * 30_000 + "a" + ")" * 30_000),
    ("a class that is open", "regex", "["),
    ("a huge count", "regex", "a{99999999999999999999}"),
    ("the empty text", "regex", ""),
    ("a look-ahead", "regex", "(?=a)b"),
    ("itself", "ebnf", "root ::= root"),
    ("no root", "ebnf", 'a ::= "b"'),
    ("repeated repetitions", "ebnf", 'root ::= ("a"{1,2000} "b"{1,2000}){1,2000}'),
    (
        "many rules",
        "ebnf",
        "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{(i * 7 + 1) % 3000} | "c"' for i in range(3000)),
    ),
    ("ambiguous", "ebnf", 'root ::= s\ns ::= s s s | s s | "a"'),
    ("no choice", "choice", "[]"),
    ("an empty choice", "choice", '["a", ""]'),
    ("half a character", "choice", '["\\ud800"]'),
    ("no tag", "structural_tag", '{"type": "structural_tag"}'),
]
_REFUSED = {
    *("nested 10,000 deep", "brackets", "a huge enum", "a reference to itself", "references in a circle", "a multiple"),
    *("from elsewhere", "doubling", "impossible bounds", "impossible number", "nothing", "no schema", "no number"),
    *("beyond numbers", "a huge number", ".{1,65535}", "a? many times", "parentheses", "a class that is open"),
    *("a huge count", "the empty text", "a look-ahead", "itself", "no root", "no choice", "an empty choice"),
    *("half a character", "no tag", "patterns in a row", "stars in a row"),
}
_TAKEN = {"(a+)+b", "a large enum", "many items", "ambiguous", "without an end"}
# Over HTTP at T1: far beyond the time, far beyond the memory, refused, taken. And what is compiled in no time.
_FEW = ("patterns in a row", "stars in a row", "a reference to itself", "nested 10,000 deep", "(a+)+b", "a large enum")
_SOUND: list[tuple[str, GrammarKind, str]] = [
    ("a sound choice", "choice", '["yes", "no"]'),
    ("a sound pattern", "regex", "[a-z ]{20,30}"),
    ("a sound schema", "json_schema", _schema(type="object", properties={"a": {"type": "integer"}})),
]
_KEYWORDS = (
    *("type", "type", "enum", "const", "properties", "items", "required", "anyOf", "oneOf", "allOf", "$ref"),
    *("not", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "format"),
    *("prefixItems", "additionalProperties", "patternProperties", "propertyNames", "$defs", "multipleOf", "if"),
    "title",
)


def _random_schema(rng: random.Random, depth: int = 4) -> Any:
    """Keywords and values that may or may not go together."""
    numbers = [0, 1, -1, 2.5, 3, 1000, -(10**12), 10**9, None, "1", True]
    inner: list[Any] = [_random_schema(rng, depth - 1) for _ in range(rng.randint(0, 3))] if depth else [True]
    kinds = ["string", "integer", "number", "object", "array", "null", "boolean", "any", ["string", "null"], 3, []]
    fields: dict[str, Any] = {}
    for _ in range(rng.randint(0, 4)):
        name = rng.choice(_KEYWORDS)
        values: dict[str, Any] = {
            "type": rng.choice(kinds),
            "enum": rng.sample(numbers, rng.randint(0, 4)),
            "properties": {f"p{i}": each for i, each in enumerate(inner)},
            "$defs": {f"p{i}": each for i, each in enumerate(inner)},
            "patternProperties": {rng.choice(["^a", "(", "b+$"]): True},
            "required": rng.sample(["p0", "p1", "other", 3], rng.randint(0, 3)),
            "pattern": rng.choice(["a+", "(a|b)*c", "(", "^x{2,9}$", '"', "\\d{3}", 5]),
            "format": rng.choice(["date", "email", "unheard-of", "iri"]),
            "$ref": rng.choice(["#", "#/$defs/p0", "#/properties/p1", "nowhere", 3]),
            "title": "x",
        }
        lists = {"anyOf", "oneOf", "allOf", "prefixItems"}
        one = inner[0] if inner else {}
        fields[name] = values.get(name, inner if name in lists else rng.choice([one, rng.choice(numbers)]))
    return fields
