"""G2: an output that a schema holds to, and that ends, is JSON and fits the schema, whatever tokens are drawn.

In place of a model, chance draws from the tokens that are allowed: the worst model there can be. The last of them are
drawn by a server, of the tiny model.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema_rs
import tokenizers

from hookline.grammar import GrammarSpec
from hookline.structured_output import GrammarMatcher, GrammarVocabulary, compile_grammar
from hookline.tokenizer import Tokenizer
from tests.suites.beside import several, watched
from tests.suites.raw_client import stream
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.watch import Watch
from tests.test_structured_output import END, MODEL, WIDTH, allowed

_PLANNED = {Tier.T1: 600, Tier.T2: 5_000}
_WALKS = 2  # through each schema
_MOST_TOKENS = 150
# Of the walks, those that end.
_FINISHED = 0.6
# Over HTTP: cases, how many at a time, and the most tokens of an answer, of which the few are to cut it.
_SERVED = {Tier.T1: 12, Tier.T2: 300}
_TOGETHER = 6
_FEW = 3
_ASKED = "Say it in JSON: "


def run(tier: Tier, seed: int) -> SuiteReport:
    kinds = ("object", "array", "string", "integer", "number", "anyOf", "$ref", "enum")
    forced = ["finished", "cut by length", *kinds, *(f"over HTTP: {reason}" for reason in ("stop", "length"))]
    tally = Tally("G2", tier, seed, _PLANNED[tier] + _SERVED[tier], forced)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    vocabulary = GrammarVocabulary(tokenizer, WIDTH, [END])
    ends = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in ('"', "}", "]", "0", ",", ":")]
    for _ in range(_PLANNED[tier] // _WALKS):
        schema = _Schemas(tally.random).make()
        source = json.dumps(schema)
        for kind in kinds:
            tally.event(kind, f'"{kind}"' in source)
        grammar = compile_grammar(GrammarSpec("json_schema", source), vocabulary)
        for _ in range(_WALKS):
            with tally.case(source):
                output = _walk(grammar.matcher(), tally.random, ends)
                tally.event("cut by length" if output is None else "finished")
                if output is not None:
                    text = tokenizer.decode(output)
                    tally.expect(jsonschema_rs.is_valid(schema, json.loads(text)), f"{source} does not allow {text!r}")
    finished = tally.events["finished"]
    tally.expect(finished > _FINISHED * tally.cases, f"only {finished} of {tally.cases} came to their end")
    asyncio.run(_over_http(tally, tier))
    return tally.report()


class _Schemas:
    """Random JSON schemas of what is supported.

    Args:
        rng: draws them.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        schema = self.one(3)
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def one(self, depth: int) -> dict[str, Any]:
        kinds = [self.integer, self.number, self.text, self.fixed, self.plain]
        kinds += [self.array, self.object, self.choice, self.named] if depth else []
        return self.rng.choice(kinds)(depth)

    def integer(self, depth: int) -> dict[str, Any]:
        low = self.rng.randint(-50, 50)
        bounds: list[dict[str, Any]] = [
            {},
            {"minimum": low},
            {"exclusiveMinimum": low, "maximum": low + 9},
            {"multipleOf": 7},
        ]
        return {"type": "integer", "title": "a whole number", **self.rng.choice(bounds)}

    def number(self, depth: int) -> dict[str, Any]:
        low = self.rng.uniform(-5, 5)
        return {"type": "number", **self.rng.choice([{}, {"minimum": round(low, 2), "maximum": round(low, 2) + 3.5}])}

    def text(self, depth: int) -> dict[str, Any]:
        limits: list[dict[str, Any]] = [
            {"maxLength": 5},
            {"minLength": 1, "maxLength": 3},
            {"pattern": '^[^"a]{1,3}.$'},
            {"format": "date"},
        ]
        return {"type": "string", **self.rng.choice(limits)}

    def fixed(self, depth: int) -> dict[str, Any]:
        values = ["x", 'q"\\', 3, -1.5, None, True, [1, "y"], {"k": [False]}, "é☃"]
        return self.rng.choice([{"const": self.rng.choice(values)}, {"enum": self.rng.sample(values, 3)}])

    def plain(self, depth: int) -> dict[str, Any]:
        return {"type": self.rng.choice(["boolean", "null", ["null", "boolean"]])}

    def array(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            return {"type": "array", "prefixItems": [self.one(depth - 1), self.one(depth - 1)], "items": False}
        low = self.rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.one(depth - 1),
            "minItems": low,
            "maxItems": low + self.rng.randint(0, 2),
        }

    def object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(["a", "b c", "é", "long name", 'quote"'], self.rng.randint(1, 3))
        required = [name for name in names if self.rng.random() < 0.6]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.one(depth - 1) for name in names},
            "required": required,
        }
        if self.rng.random() < 0.3:
            schema["additionalProperties"] = self.rng.choice([False, True, {"type": "integer"}])
        elif self.rng.random() < 0.3:
            schema |= {"additionalProperties": False, "maxProperties": max(1, len(required))}
        return schema

    def choice(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.one(depth - 1) for _ in range(self.rng.randint(1, 3))], "description": "any of them"}

    def named(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.one(depth - 1)
        return {"$ref": f"#/$defs/{name}"}


def _walk(matcher: GrammarMatcher, rng: random.Random, ends: list[int]) -> list[int] | None:
    """A way through a grammar, at random at first, then with a liking for what ends; None if it does not end."""
    output = list[int]()
    while not matcher.is_finished:
        [found] = allowed(matcher)
        if not found:
            raise RuntimeError("nothing is allowed, and the grammar is not finished")
        if END in found:
            return output
        near = [token_id for token_id in ends if token_id in found]
        output.append(rng.choice(near) if near and rng.random() < len(output) / 12 else rng.choice(sorted(found)))
        matcher.accept(output[-1])
        if len(output) > _MOST_TOKENS:
            return None
    return output


@dataclass(frozen=True, slots=True)
class _Asked:
    """An answer that is asked for over HTTP."""

    schema: dict[str, Any]
    seed: int
    most_tokens: int
    is_chat: bool


async def _over_http(tally: Tally, tier: Tier) -> None:
    rng = tally.random
    every = [
        _Asked(_Schemas(rng).make(), rng.randrange(2**31), _MOST_TOKENS if number % 4 else _FEW, number % 2 > 0)
        for number in range(_SERVED[tier])
    ]
    with tiny_model() as model:
        async with watched(tally, model) as watch:
            await several(_TOGETHER, partial(_answer, tally, watch), every)


def _finite(text: str) -> float:
    """A number that JSON can write may be more than a float can hold: `9e999` is a number to a schema all the same."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


async def _answer(tally: Tally, watch: Watch, asked: _Asked) -> None:
    """One answer, which is whole and fits, or has as many tokens as it may."""
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": asked.schema}}
    body: dict[str, Any] = {"temperature": 1, "seed": asked.seed, "max_tokens": asked.most_tokens}
    body |= {"response_format": form, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": _ASKED}]
    body |= {"messages": messages} if asked.is_chat else {"prompt": _ASKED}
    with tally.case(f"over HTTP: {asked}"):
        path = "/v1/chat/completions" if asked.is_chat else "/v1/completions"
        told = await stream(watch.served.port, body, path)
        watch.reply(f"over HTTP: {asked}", told)
        reason, text = told.finish.get(0), told.text()
        if reason == "stop":
            fits = jsonschema_rs.is_valid(asked.schema, json.loads(text, parse_float=_finite))
            tally.expect(fits, f"over HTTP: {asked} does not allow {text!r}")
        else:
            made = (told.usage or {}).get("completion_tokens")
            cut = reason == "length" and made == asked.most_tokens
            tally.expect(cut, f"over HTTP: {asked} ends with {reason} after {made} tokens: {told.error or told.broken}")
        tally.event(f"over HTTP: {reason}")
