"""G1: grammars that break compilers. Each is compiled or refused within its limits, by a process that stays.

Each one is a fork of that process, with limits of its own, which takes some 15 ms; at T2 two such processes work beside
each other, on a processor each.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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
from tests.suites.report import SuiteReport, Tally, Tier

_MODEL = ROOT / "tests" / "data" / "tiny-glm5.2-mtp"
_VOCABULARY, _END = 8192, 8175
_GENERATED = {Tier.T1: 200, Tier.T2: 20_000}
_LIMITS = Limits(grammar_seconds=1.0)
# By the clock, of a processor that has other things to do.
_SECONDS, _STEP_SECONDS = 8.0, 0.5
_MOST_CHARACTERS = 500


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["compiled", "refused", "out of time", "out of memory", "generated and compiled", "generated and refused"]
    tally = Tally("G1", tier, seed, len(_HOSTILE) + _GENERATED[tier], forced)
    asyncio.run(_run(tally, tier))
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
    *("half a character", "no tag"),
}
_TAKEN = {"(a+)+b", "a large enum", "many items", "ambiguous", "without an end"}
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
