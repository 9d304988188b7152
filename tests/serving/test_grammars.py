"""Hostile grammars of clients: each is compiled or refused within its limits, and the process for the next is there."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from hookline.errors import InvalidRequestError, PluginError, ServerError
from hookline.grammar import GrammarKind, GrammarSpec
from hookline.serving.grammars import GrammarCompiler
from hookline.serving.limits import Limits
from hookline.serving.messages import Facts
from hookline.structured_output import CompiledGrammar, GrammarVocabulary
from hookline.tokenizer import Tokenizer

MODEL = Path(__file__).parents[1] / "data" / "tiny-glm5.2-mtp"
VOCABULARY, END = 8192, 8175


def facts(**changes: Any) -> Facts:
    known: dict[str, Any] = dict.fromkeys(("name", "architecture", "plugin", "device", "dtype"), "tiny")
    counts = ("max_model_len", "block_size", "num_blocks", "max_running", "max_batch_tokens")
    known |= dict.fromkeys(counts, 1) | {"prefix_caching": False, "special_tokens": {}, "eos_token_ids": [END]}
    tokenizer = (MODEL / "tokenizer.json").read_bytes()
    return Facts(**known | {"vocab_size": VOCABULARY, "tokenizer_json": tokenizer} | changes)


class Serving:
    """A compiler and the loop that it lives in, for many tests: its process takes seconds to start."""

    def __init__(self, limits: Limits) -> None:
        self.runner = asyncio.Runner()
        self.compiler = GrammarCompiler(facts(), limits)

    def run(self, use: Callable[[GrammarCompiler], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(use(self.compiler))


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    made = Serving(Limits(grammar_seconds=1.0))
    yield made
    process = made.compiler._process
    made.runner.run(made.compiler.close())
    assert process is None or process.returncode is not None
    made.runner.close()


def test_a_plugin_that_wants_another_backend_is_refused_at_the_start() -> None:
    for name in ("", "xgrammar"):
        GrammarCompiler(facts(structured_output_backend=name), Limits())
    with pytest.raises(PluginError, match="'outlines'"):
        GrammarCompiler(facts(structured_output_backend="outlines"), Limits())


async def outcome(compiler: GrammarCompiler, spec: GrammarSpec) -> bytes | str:
    """The compiled grammar, or why there is none."""
    try:
        return await compiler.compile(spec)
    except InvalidRequestError as error:
        return error.message


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    return GrammarVocabulary(tokenizer, VOCABULARY, [END])


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def schema(**fields: Any) -> str:
    return json.dumps(fields)


def doubling(depth: int) -> str:
    """Each definition names the next one twice."""
    defs: dict[str, Any] = {f"d{depth}": {"type": "integer"}}
    for level in range(depth):
        twice = {name: {"$ref": f"#/$defs/d{level + 1}"} for name in "ab"}
        defs[f"d{level}"] = {"type": "object", "properties": twice}
    return schema(**{"$ref": "#/$defs/d0", "$defs": defs})


HOSTILE: list[tuple[str, GrammarKind, str]] = [
    ("nested 10,000 deep", "json_schema", nested(10_000)),
    ("nested 200 deep", "json_schema", nested(200)),
    ("brackets", "json_schema", "[" * 60_000),
    ("a huge enum", "json_schema", schema(enum=[f"{'x' * 50}{i}" for i in range(100_000)])),
    ("a large enum", "json_schema", schema(enum=[f"v{i}" for i in range(4000)])),
    ("a reference to itself", "json_schema", schema(**{"$ref": "#"})),
    ("references in a circle", "json_schema", '{"$ref":"#/a","a":{"$ref":"#/b"},"b":{"$ref":"#/a"}}'),
    ("without an end", "json_schema", schema(type="object", properties={"a": {"$ref": "#"}}, required=["a"])),
    ("from elsewhere", "json_schema", schema(**{"$ref": "https://example.com/schema"})),
    ("doubling", "json_schema", doubling(40)),
    ("impossible bounds", "json_schema", schema(type="array", minItems=5, maxItems=2)),
    ("impossible number", "json_schema", schema(type="integer", minimum=5, maximum=2)),
    ("nothing", "json_schema", "false"),
    ("no schema", "json_schema", "3"),
    ("no number", "json_schema", '{"type": "number", "minimum": NaN}'),
    ("beyond numbers", "json_schema", '{"type": "number", "minimum": 1e400}'),
    ("a huge number", "json_schema", schema(type="integer", minimum=-(10**30), maximum=10**300)),
    ("many items", "json_schema", schema(type="array", minItems=10**5, maxItems=10**6, items={"type": "integer"})),
    ("a long text", "json_schema", schema(type="string", minLength=60_000, maxLength=10**9)),
    ("many properties", "json_schema", schema(type="object", properties={f"p{i}": {} for i in range(2000)})),
    ("repeated pattern", "json_schema", schema(type="string", pattern="(a{1,300}){1,300}")),
    ("a multiple", "json_schema", schema(type="integer", multipleOf=99_991)),
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
REFUSED = {
    *("nested 10,000 deep", "brackets", "a huge enum", "a reference to itself", "references in a circle", "a multiple"),
    *("from elsewhere", "doubling", "impossible bounds", "impossible number", "nothing", "no schema", "no number"),
    *("beyond numbers", "a huge number", ".{1,65535}", "a? many times", "parentheses", "a class that is open"),
    *("a huge count", "the empty text", "a look-ahead", "itself", "no root", "no choice", "an empty choice"),
    *("half a character", "no tag"),
}


def use_it(data: bytes, vocabulary: GrammarVocabulary) -> None:
    """Random steps of an output that is held to a grammar: none takes long."""
    matcher = CompiledGrammar.from_bytes(data, vocabulary).matcher()
    mask, rng = torch.zeros((1, VOCABULARY // 32), dtype=torch.int32), random.Random(0)
    for _ in range(30):
        begin = time.thread_time()
        matcher.fill(mask, ())
        assert time.thread_time() - begin < 0.5
        words = [(word, bits) for word, bits in enumerate(mask[0].tolist()) if bits]
        if not words:
            return
        word, bits = rng.choice(words)
        matcher.accept(32 * word + rng.choice([bit for bit in range(32) if bits >> bit & 1]))
        if matcher.is_finished:
            return


def test_hostile_grammars(vocabulary: GrammarVocabulary, serving: Serving) -> None:
    """Each within its time by the clock, all by one process, and none is taken that should not be."""
    limits = serving.compiler._limits

    async def use(compiler: GrammarCompiler) -> dict[str, bytes | str]:
        await compiler.start()
        process, found = compiler._process, {}
        for name, kind, source in HOSTILE:
            begin = time.monotonic()
            found[name] = await outcome(compiler, GrammarSpec(kind, source))
            assert time.monotonic() - begin < 8.0, name
        assert compiler._process is process and compiler.kept_bytes <= limits.grammar_cache_bytes
        return found

    found = serving.run(use)
    assert len(found) >= 40
    taken = {name for name, answer in found.items() if isinstance(answer, bytes)}
    assert not taken & REFUSED
    assert {"(a+)+b", "a large enum", "many items", "ambiguous", "without an end"} <= taken
    assert "it takes more than 1 s" in str(found["a? many times"])
    assert "memory" in str(found["a huge enum"])
    assert all(len(answer) < 500 for answer in found.values() if isinstance(answer, str))
    for answer in found.values():
        if isinstance(answer, bytes):
            assert len(answer) <= limits.grammar_cache_bytes // 16
            use_it(answer, vocabulary)


KEYWORDS = [
    "type",
    "type",
    "enum",
    "const",
    "properties",
    "items",
    "required",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "not",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "pattern",
    "format",
    "prefixItems",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "$defs",
    "multipleOf",
    "if",
    "title",
]


def random_schema(rng: random.Random, depth: int = 4) -> Any:
    """Keywords and values that may or may not go together."""
    numbers = [0, 1, -1, 2.5, 3, 1000, -(10**12), 10**9, None, "1", True]
    inner: list[Any] = [random_schema(rng, depth - 1) for _ in range(rng.randint(0, 3))] if depth else [True]
    kinds = ["string", "integer", "number", "object", "array", "null", "boolean", "any", ["string", "null"], 3, []]
    fields: dict[str, Any] = {}
    for _ in range(rng.randint(0, 4)):
        name = rng.choice(KEYWORDS)
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


def test_generated_schemas(serving: Serving) -> None:
    async def use(compiler: GrammarCompiler) -> list[bytes | str]:
        await compiler.start()
        process, rng = compiler._process, random.Random(7)
        sources = [json.dumps(random_schema(rng)) for _ in range(200)]
        found = [await outcome(compiler, GrammarSpec("json_schema", source)) for source in sources]
        assert compiler._process is process
        return found

    found = serving.run(use)
    assert sum(isinstance(answer, bytes) for answer in found) > 30
    assert sum(isinstance(answer, str) for answer in found) > 30
    assert not any("takes more" in answer or "memory" in answer for answer in found if isinstance(answer, str))


SMALL = [GrammarSpec("regex", f"[a-c]{{{i},9}}") for i in range(1, 7)]


def test_grammars_are_kept_and_shared(serving: Serving) -> None:
    """Those that were asked for longest ago are let go when there is no room."""

    async def use(compiler: GrammarCompiler) -> None:
        together = await asyncio.gather(*(compiler.compile(SMALL[0]) for _ in range(20)))
        assert all(data is together[0] for data in together)
        compiler._kept.clear()
        kept = [await compiler.compile(spec) for spec in SMALL[:3]]
        compiler._limits = Limits(grammar_seconds=1.0, grammar_cache_bytes=compiler.kept_bytes)
        assert await compiler.compile(SMALL[0]) is kept[0]
        await compiler.compile(SMALL[3])
        assert SMALL[1] not in compiler._kept and {SMALL[0], SMALL[3]} <= compiler._kept.keys()
        assert compiler.kept_bytes <= compiler._limits.grammar_cache_bytes
        compiler._limits = Limits(grammar_seconds=1.0)

    serving.run(use)


def test_who_leaves_does_not_disturb_the_others(serving: Serving) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        waiting = [asyncio.create_task(compiler.compile(spec)) for spec in SMALL]
        same = asyncio.create_task(compiler.compile(SMALL[0]))
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        found = await asyncio.gather(*waiting, same, return_exceptions=True)
        left = [isinstance(each, asyncio.CancelledError) for each in found]
        assert left == [True, False] * 3 + [False]
        # Each answer is its own grammar's, not the one before's.
        for spec, data in zip(SMALL, found, strict=False):
            compiler._kept.clear()
            assert isinstance(data, asyncio.CancelledError) or await compiler.compile(spec) == data

    serving.run(use)


def test_what_nobody_waits_for_any_more_is_not_begun(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        begun, go_on, ready = list[GrammarSpec | None](), asyncio.Event(), compiler._ready

        async def wait_first() -> asyncio.subprocess.Process:
            begun.append(compiler._at_work)
            await go_on.wait()
            return await ready()

        monkeypatch.setattr(compiler, "_ready", wait_first)
        asked = [asyncio.create_task(compiler.compile(spec)) for spec in SMALL]
        again = asyncio.create_task(compiler.compile(SMALL[1]))
        await asyncio.sleep(0)
        for task in asked[:5]:
            task.cancel()
        await asyncio.gather(*asked[:5], return_exceptions=True)
        anew = asyncio.create_task(compiler.compile(SMALL[2]))  # after the one before it was given up
        go_on.set()
        assert all(await asyncio.gather(again, asked[5], anew))
        assert begun == [SMALL[0], SMALL[1], SMALL[5], SMALL[2]]
        assert not compiler._running and not compiler._askers

    serving.run(use)


def test_a_process_that_is_gone_is_started_anew(serving: Serving) -> None:
    """Whoever waits for it is refused; the next is served."""

    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        process = compiler._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        task = asyncio.create_task(compiler.compile(SMALL[0]))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(InvalidRequestError, match="it takes too long"):
            await task
        assert await compiler.compile(SMALL[1])
        assert compiler._process is not process
        await process.wait()

    serving.run(use)


def test_one_that_hangs_is_killed(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.serving.grammars._GRACE_SECONDS", -3.9)

    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGSTOP)
        with pytest.raises(InvalidRequestError, match="it takes too long"):
            await compiler.compile(SMALL[0])
        assert compiler._process is None

    serving.run(use)


def test_what_cannot_start_is_told() -> None:
    async def run(**changes: Any) -> None:
        await GrammarCompiler(facts(**changes), Limits()).compile(SMALL[0])

    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        asyncio.run(run(tokenizer_json=None))
    with pytest.raises(ServerError, match="does not start"):
        asyncio.run(run(tokenizer_json=b"nothing"))


def test_closing_ends_those_who_wait_and_what_is_at_work(serving: Serving) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        process = compiler._process
        assert process is not None
        task = asyncio.create_task(compiler.compile(GrammarSpec("regex", "a?" * 3000 + "a" * 3000)))
        forks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := forks.read_text().split()):
            await asyncio.sleep(0.001)
        os.kill(int(found[0]), signal.SIGSTOP)  # no limit on its time ends it now
        await compiler.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert process.returncode is not None
        deadline = time.monotonic() + 10
        while _is_alive(int(found[0])):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    serving.run(use)


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
