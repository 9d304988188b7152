"""G2: an output that a schema holds to, and that ends, is JSON and fits the schema, whatever tokens are drawn.

In place of a model, chance draws from the tokens that are allowed: the worst model there can be.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import tokenizers

from hookline.grammar import GrammarSpec
from hookline.structured_output import GrammarMatcher, GrammarVocabulary, compile_grammar
from hookline.tokenizer import Tokenizer
from tests.suites.report import SuiteReport, Tally, Tier
from tests.test_structured_output import END, MODEL, WIDTH, allowed

_PLANNED = {Tier.T1: 600, Tier.T2: 5_000}
_WALKS = 2  # through each schema
_MOST_TOKENS = 150
# Of the walks, those that end.
_FINISHED = 0.6


def run(tier: Tier, seed: int) -> SuiteReport:
    kinds = ("object", "array", "string", "integer", "number", "anyOf", "$ref", "enum")
    tally = Tally("G2", tier, seed, _PLANNED[tier], ["finished", "cut by length", *kinds])
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    vocabulary = GrammarVocabulary(tokenizer, WIDTH, [END])
    ends = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in ('"', "}", "]", "0", ",", ":")]
    whole = {token_id for token_id in range(8192) if "\ufffd" not in tokenizer.token_text(token_id)}
    for _ in range(_PLANNED[tier] // _WALKS):
        schema = _Schemas(tally.random).make()
        source = json.dumps(schema)
        for kind in kinds:
            tally.event(kind, f'"{kind}"' in source)
        grammar = compile_grammar(GrammarSpec("json_schema", source), vocabulary)
        for _ in range(_WALKS):
            with tally.case(source):
                output = _walk(grammar.matcher(), tally.random, whole, ends)
                tally.event("cut by length" if output is None else "finished")
                if output is not None:
                    text = tokenizer.decode(output)
                    tally.expect(jsonschema_rs.is_valid(schema, json.loads(text)), f"{source} does not allow {text!r}")
    finished = tally.events["finished"]
    tally.expect(finished > _FINISHED * tally.cases, f"only {finished} of {tally.cases} came to their end")
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


def _walk(matcher: GrammarMatcher, rng: random.Random, whole: set[int], ends: list[int]) -> list[int] | None:
    """A way through a grammar, at random at first, then with a liking for what ends; None if it does not end.

    Only by tokens of `whole` characters: in bytes xgrammar would let half of a surrogate pair be one.
    """
    output = list[int]()
    while not matcher.is_finished:
        [found] = allowed(matcher)
        if not found:
            raise RuntimeError("nothing is allowed, and the grammar is not finished")
        if END in found:
            return output
        found = found & whole or found  # a character that has no token of its own comes in bytes
        near = [token_id for token_id in ends if token_id in found]
        output.append(rng.choice(near) if near and rng.random() < len(output) / 12 else rng.choice(sorted(found)))
        matcher.accept(output[-1])
        if len(output) > _MOST_TOKENS:
            return None
    return output
