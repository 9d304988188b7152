"""Which JSON schemas can be held to: what the grammar would leave out of a schema is refused, never ignored.

The rules follow what xgrammar's converter does. It reads some keywords alone, whatever stands beside them, and knows
others not at all. Names that JSON Schema does not have, and notes such as `title`, are left aside, as it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hookline.errors import InvalidRequestError

_UNKNOWN = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains"}
    | {"maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "additionalItems"}
)
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"maxProperties", "unevaluatedProperties"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"})
_OF_TEXTS = frozenset({"pattern", "minLength", "maxLength", "format"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TYPED = _OF_OBJECTS | _OF_ARRAYS | _OF_TEXTS | _OF_NUMBERS
# From these alone xgrammar knows that a schema without `type` is one of objects, or of arrays.
_TELLS_OBJECTS = frozenset({"properties", "additionalProperties", "unevaluatedProperties"})
_TELLS_ARRAYS = frozenset({"items", "prefixItems", "unevaluatedItems"})
_UNKNOWN_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})

# What xgrammar writes into JSON as it stands in a pattern, though JSON spells it otherwise; in a class it does not.
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_NOT_ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\nrtfv0uxc]')

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("additionalProperties", "items", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")


def check_schema(schema: object) -> None:
    """Checks that all a JSON schema says can be held to.

    Raises:
        InvalidRequestError: naming the place and the keyword that cannot.
    """
    pending = [("#", schema)]
    while pending:
        place, one = pending.pop()
        if isinstance(one, Mapping):
            for fault in _faults(one):
                raise InvalidRequestError(
                    f"the JSON schema cannot be held to at {place[:200]}: {fault}",
                    field="response_format",
                    hint="Leave it out, or write the schema without it.",
                )
            pending.extend(_inner(one, place))


def _inner(schema: Mapping[str, object], place: str) -> Iterator[tuple[str, object]]:
    """The schemas inside a schema, each with its place."""
    for name in _NAMED:
        value = schema.get(name)
        if isinstance(value, Mapping):
            yield from ((f"{place}/{name}/{key}", each) for key, each in value.items())
    for name in _SINGLE:
        value = schema.get(name)
        if name == "propertyNames" and isinstance(value, Mapping):
            value = {"type": "string", **value}  # which goes without saying
        yield f"{place}/{name}", value
    for name in _LISTED:
        value = schema.get(name)
        if isinstance(value, list):
            yield from ((f"{place}/{name}/{index}", each) for index, each in enumerate(value))


def _faults(schema: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(_UNKNOWN & schema.keys()):
        if not (name == "uniqueItems" and schema[name] is False):
            yield f"{name} is not supported"
    alone = [name for name in _ALONE if name in schema]
    if alone:
        yield from _faults_alone(schema, alone)
    else:
        yield from _faults_of_types(schema)


def _faults_alone(schema: Mapping[str, object], alone: list[str]) -> Iterator[str]:
    first, beside = alone[0], set(alone[1:]) | (_TYPED & schema.keys())
    values = {"const": [schema.get("const")], "enum": schema.get("enum")}.get(first)
    if "type" in schema and not isinstance(values, list):
        beside.add("type")
    if beside:
        yield f"{first} cannot stand beside {', '.join(sorted(beside))}"
    if "type" in schema and isinstance(values, list) and not all(_is_of(value, schema["type"]) for value in values):
        yield f"{first} holds a value that its type does not allow"
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        yield "allOf of more than one schema is not supported"
    target = schema.get("$ref")
    if target is not None and not (isinstance(target, str) and (target == "#" or target.startswith("#/"))):
        yield "$ref must be # or begin with #/: only places of the schema itself can be named"


def _is_of(value: object, types: object) -> bool:
    """Whether a value is of one of the types that a schema names."""
    wanted = types if isinstance(types, list) else [types]
    if isinstance(value, bool):
        return "boolean" in wanted
    if isinstance(value, int | float):
        return "number" in wanted or ("integer" in wanted and float(value).is_integer())
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value)) in wanted


def _faults_of_types(schema: Mapping[str, object]) -> Iterator[str]:
    used = _TYPED & schema.keys()
    if "type" not in schema:
        is_object = used <= _OF_OBJECTS and used & _TELLS_OBJECTS
        is_array = used <= _OF_ARRAYS and used & _TELLS_ARRAYS
        if used and not is_object and not is_array:
            yield f"{', '.join(sorted(used))} needs a type beside it"
    found = schema.get("type")
    types = found if isinstance(found, list) else [found]
    if "multipleOf" in used and "number" in types:
        yield "multipleOf is supported for the type integer alone"
    if schema.get("format") in _UNKNOWN_FORMATS:
        yield f"the format {schema['format']} is not supported"
    yield from _faults_of_pattern(schema.get("pattern"))
    kinds = [bool(used & names) for names in ({"pattern"}, {"format"}, {"minLength", "maxLength"})]
    if sum(kinds) > 1:
        yield "of pattern, format and lengths only one is supported at a time"
    yield from _faults_of_objects(schema)


def _faults_of_pattern(pattern: object) -> Iterator[str]:
    if isinstance(pattern, str) and _NOT_ESCAPED.search(_CLASS.sub("", pattern)):
        yield "a pattern with a quotation mark, a backslash or a control character, but in brackets, is not supported"


def _faults_of_objects(schema: Mapping[str, object]) -> Iterator[str]:
    patterns, named = schema.get("patternProperties"), schema.get("properties")
    if isinstance(patterns, Mapping) and (len(patterns) > 1 or named):
        yield "patternProperties of more than one pattern, or beside properties, is not supported"
    for name in patterns if isinstance(patterns, Mapping) else ():
        yield from _faults_of_pattern(name)
    if "propertyNames" in schema and (named or patterns):
        yield "propertyNames beside properties or patternProperties is not supported"
    required, least = schema.get("required"), schema.get("minProperties")
    described = named if isinstance(named, Mapping) else {}
    missing = [name for name in required if name not in described] if isinstance(required, list) else []
    if missing and not isinstance(schema.get("additionalProperties"), Mapping):
        yield f"required names {str(missing[0])[:100]!r}, which properties does not describe"
    is_open = not named or bool(patterns) or schema.get("additionalProperties", False) is not False
    known = len(required) if isinstance(required, list) else 0
    if is_open and isinstance(least, int | float) and least > max(known, 0):
        yield "minProperties beyond the required ones needs closed properties: a name could come twice"
