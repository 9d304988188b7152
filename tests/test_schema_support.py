"""JSON schemas: what can be held to is held to, and what cannot is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
import tokenizers

from hookline.errors import InvalidRequestError
from hookline.grammar import GrammarSpec
from hookline.schema_support import check_schema
from hookline.structured_output import GrammarMatcher, GrammarVocabulary, compile_grammar
from hookline.tokenizer import Tokenizer
from tests.test_structured_output import END, MODEL, WIDTH, allowed


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, WIDTH, [END])


class _Schemas:
    """Random JSON schemas of what is supported.

    Args:
        seed: fixes them.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
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
        bounds = [{}, {"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 9}, {"multipleOf": 7}]
        return {"type": "integer", "title": "a whole number", **self.rng.choice(bounds)}

    def number(self, depth: int) -> dict[str, Any]:
        low = self.rng.uniform(-5, 5)
        return {"type": "number", **self.rng.choice([{}, {"minimum": round(low, 2), "maximum": round(low, 2) + 3.5}])}

    def text(self, depth: int) -> dict[str, Any]:
        limits = [{"maxLength": 5}, {"minLength": 1, "maxLength": 3}, {"pattern": '^[^"a]{1,3}.$'}, {"format": "date"}]
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
        schema = {"type": "object", "properties": {name: self.one(depth - 1) for name in names}, "required": required}
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


def walk(matcher: GrammarMatcher, rng: random.Random, whole: set[int], ends: list[int], most: int) -> list[int] | None:
    """A way through a grammar, at random at first, then with a liking for what ends; None if it does not end.

    Only by tokens of `whole` characters: in bytes xgrammar would let half of a surrogate pair be one.
    """
    output = list[int]()
    while not matcher.is_finished:
        [found] = allowed(matcher)
        assert found, "nothing is allowed, and the grammar is not finished"
        if END in found:
            return output
        found = found & whole or found  # a character that has no token of its own comes in bytes
        near = [token_id for token_id in ends if token_id in found]
        output.append(rng.choice(near) if near and rng.random() < len(output) / 12 else rng.choice(sorted(found)))
        matcher.accept(output[-1])
        if len(output) > most:
            return None
    return output


def test_every_finished_output_validates(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Random schemas, and random tokens of those that are allowed: the worst model there can be."""
    ends = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in ('"', "}", "]", "0", ",", ":")]
    whole = {token_id for token_id in range(8192) if "\ufffd" not in tokenizer.token_text(token_id)}
    finished, unfinished = 0, 0
    for seed in range(300):
        schema = _Schemas(seed).make()
        grammar = compile_grammar(GrammarSpec("json_schema", json.dumps(schema)), vocabulary)
        for run in range(2):
            output = walk(grammar.matcher(), random.Random(f"{seed}/{run}"), whole, ends, 150)
            if output is None:
                unfinished += 1
                continue
            finished += 1
            text = tokenizer.decode(output)
            value = json.loads(text)
            assert jsonschema_rs.is_valid(schema, value), (schema, text)
    assert finished > 400, f"{unfinished} did not end"


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"not": {"type": "integer"}}, "not is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"type": "array", "items": {"type": "object", "dependentRequired": {}}}, "#/items: dependentRequired"),
        ({"if": {}, "then": {}, "else": {}}, "is not supported"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf of more than one schema"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "anyOf cannot stand beside minimum"),
        ({"type": "object", "oneOf": [{"required": ["a"]}]}, "oneOf cannot stand beside type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minLength": 1}, r"\$ref cannot stand beside minLength"),
        ({"$ref": "https://example.com/schema"}, r"\$ref must be # or begin with #/"),
        ({"type": "string", "enum": ["a", 1]}, "enum holds a value that its type does not allow"),
        ({"type": "integer", "const": True}, "const holds a value that its type does not allow"),
        ({"enum": ["a"], "minLength": 3}, "enum cannot stand beside minLength"),
        ({"minimum": 3}, "minimum needs a type beside it"),
        ({"properties": {"a": {"required": ["b"]}}}, "#/properties/a: required needs a type"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf is supported for the type integer alone"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "only one is supported at a time"),
        ({"type": "string", "pattern": 'a"'}, "a pattern with a quotation mark"),
        ({"type": "object", "patternProperties": {"a\\\\": {}}}, "a pattern with a quotation mark"),
        ({"type": "string", "format": "iri"}, "the format iri is not supported"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties of more than one"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "propertyNames beside"),
        ({"type": "object", "minProperties": 2}, "minProperties beyond the required ones"),
        ({"$defs": {"x": {"anyOf": [{"contains": {}}]}}, "type": "null"}, r"#/\$defs/x/anyOf/0: contains"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_what_a_schema_cannot_be_held_to_is_refused(schema: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=fault):
        check_schema(schema)


def test_what_a_schema_can_be_held_to_is_let_through() -> None:
    """As Pydantic and the clients write it."""
    check_schema(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Answer",
            "$defs": {"Kind": {"type": "string", "enum": ["a", "b"], "title": "Kind"}},
            "type": "object",
            "properties": {
                "kind": {"$ref": "#/$defs/Kind", "description": "of what kind", "default": "a"},
                "size": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None},
                "parts": {"type": "array", "items": {"$ref": "#"}, "uniqueItems": False},
                "name": {"type": ["string", "null"], "pattern": '^[^"\\\\]+$'},
                "not": {"allOf": [{"$ref": "#/$defs/Kind"}]},
                "count": {"type": "integer", "const": 3.0},
                "more": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": True},
            },
            "required": ["kind"],
            "additionalProperties": False,
        }
    )
