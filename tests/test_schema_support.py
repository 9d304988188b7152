"""JSON schemas: what can be held to is let through, and what cannot is refused. Suite G2 tries the former."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.schema_support import check_schema


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
        ({"type": "object", "required": ["b"]}, "required names 'b'"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "required names 'b'"),
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
