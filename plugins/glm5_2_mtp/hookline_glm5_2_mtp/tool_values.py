"""What type an argument's text has: GLM writes texts bare and everything else as JSON."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

_KEYWORDS_OF_PARTS = ("allOf", "anyOf", "oneOf")
_MAX_DEPTH = 64


class ToolValues:
    """Reads the argument values of one tool.

    Args:
        parameters: the JSON schema of the tool's arguments, as the client gave it; anything else means no schema.
    """

    def __init__(self, parameters: object) -> None:
        self._root = parameters
        self._unknown = _Property(parameters, [])

    def to_json(self, key: str, text: str) -> str:
        """The JSON of an argument's text.

        The text is JSON already, unless it is none, is a JSON string (whose quotes are then part of it), or the schema
        admits nothing but text. Of a list whose items must be texts, the other items become texts.
        """
        known = self._properties.get(key, self._unknown)
        stripped = text.strip(" \t\n\r")
        if known.choices and text not in known.choices and stripped in known.choices:
            text = stripped
        if stripped.startswith('"') or known.is_text:
            return _dump(text)
        try:
            value = json.loads(stripped, parse_constant=_refuse)
            if isinstance(value, list) and known.has_text_items:
                return _dump([item if isinstance(item, str) else _dump(item) for item in value])
        except (ValueError, RecursionError):
            return _dump(text)
        return stripped

    @cached_property
    def _properties(self) -> dict[str, _Property]:
        schemas: dict[str, list[object]] = {}
        for part in _parts(self._root, self._root):
            properties = part.get("properties")
            for key, schema in properties.items() if isinstance(properties, Mapping) else ():
                schemas.setdefault(key, []).append(schema)
        return {key: _Property(self._root, found) for key, found in schemas.items()}


class _Property:
    """What the schemas of one argument say.

    Attributes:
        is_text: they admit nothing but text.
        has_text_items: they admit lists, of nothing but texts.
        choices: the texts that they list.
    """

    def __init__(self, root: object, schemas: Sequence[object]) -> None:
        parts = [part for schema in schemas for part in _parts(root, schema)]
        items = [part["items"] for part in parts if "items" in part]
        self.is_text = bool(schemas) and all(_admits_only_text(root, schema, {}) for schema in schemas)
        self.has_text_items = bool(items) and all(_admits_only_text(root, schema, {}) for schema in items)
        listed = [value for part in parts for value in _choices(part)]
        self.choices = frozenset(value for value in listed if isinstance(value, str))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _choices(schema: Mapping[str, Any]) -> Sequence[object]:
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []


def _parts(root: object, schema: object) -> Iterator[Mapping[str, Any]]:
    """The schema and all that it is put together from, each once."""
    seen: set[int] = set()
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            pending += _lists(part, *_KEYWORDS_OF_PARTS)
            pending.append(_referred(root, part))


def _lists(schema: Mapping[str, Any], *keywords: str) -> list[object]:
    return [part for word in keywords for part in (schema[word] if isinstance(schema.get(word), list) else ())]


def _referred(root: object, schema: Mapping[str, Any]) -> object:
    """What a schema's local reference stands for (RFC 6901); None without one."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for word in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        key = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _admits_only_text(root: object, schema: object, known: dict[int, bool], depth: int = 0) -> bool:
    """Whether no value but a string can satisfy a schema; no, where references go round in a circle or too deep.

    Args:
        known: answers by the schema's id, so that each is looked at once.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return False
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = False
    kind, choices = schema.get("type"), _choices(schema)
    answer = kind == "string" or kind == ["string"]
    answer = answer or (bool(choices) and all(isinstance(choice, str) for choice in choices))
    for word in _KEYWORDS_OF_PARTS:
        parts = [_admits_only_text(root, part, known, depth + 1) for part in _lists(schema, word)]
        answer = answer or (any(parts) if word == "allOf" else bool(parts) and all(parts))
    answer = answer or _admits_only_text(root, _referred(root, schema), known, depth + 1)
    known[id(schema)] = answer
    return answer
