"""What an answer must look like: the fields by which clients say so, and the one grammar that they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from hookline.grammar import GrammarKind, GrammarSpec
from hookline.serving.api_errors import ApiError
from hookline.serving.limits import Limits
from hookline.serving.requests.bodies import Body

Schema = str | dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=65536, fail_fast=True)]


class JsonSchemaFormat(Body):
    """OpenAI's `json_schema`. The answer obeys the schema, whatever `strict` says."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema of the answer.")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of them."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema, as an object or as text.")
    regex: str | None = None
    choice: Choices | None = Field(None, description="Texts, one of which the answer is.")
    grammar: str | None = Field(None, description="In GBNF-like notation, with the rule `root`.")
    json_object: bool | None = None


class ConstraintFields(Body):
    """Of chat and of completions. At most one of them can hold."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(None, description="As `structured_outputs.json`.")
    guided_regex: str | None = Field(None, description="As `structured_outputs.regex`.")
    guided_choice: Choices | None = Field(None, description="As `structured_outputs.choice`.")
    guided_grammar: str | None = Field(None, description="As `structured_outputs.grammar`.")


def requested_grammar(body: ConstraintFields, limits: Limits) -> tuple[GrammarSpec | None, str]:
    """The grammar that a body asks for, and the field that asks.

    Raises:
        ApiError: 400 if there are several, or one is too large.
    """
    shape, structured = body.response_format, body.structured_outputs or StructuredOutputs.model_validate({})
    asked: list[tuple[GrammarKind, object, str]] = []
    if shape is not None and shape.type == "json_object":
        asked.append(("json_object", None, "response_format"))
    elif shape is not None and shape.type == "json_schema":
        if shape.json_schema is None:
            param = "response_format.json_schema"
            raise ApiError(400, f"{param} is missing; give an object with name and schema.", param=param)
        asked.append(("json_schema", shape.json_schema.schema_, "response_format.json_schema.schema"))
    if structured.json_object:
        asked.append(("json_object", None, "structured_outputs.json_object"))
    fields: tuple[tuple[GrammarKind, object, object, str, str], ...] = (
        ("json_schema", structured.json_, body.guided_json, "json", "guided_json"),
        ("regex", structured.regex, body.guided_regex, "regex", "guided_regex"),
        ("choice", structured.choice, body.guided_choice, "choice", "guided_choice"),
        ("ebnf", structured.grammar, body.guided_grammar, "grammar", "guided_grammar"),
    )
    for kind, new, old, new_name, old_name in fields:
        asked.extend([(kind, new, f"structured_outputs.{new_name}")] if new is not None else [])
        asked.extend([(kind, old, old_name)] if old is not None else [])
    if len(asked) > 1:
        names = " and ".join(param for _, _, param in asked)
        raise ApiError(400, f"An answer obeys one constraint; there are {len(asked)}: {names}.", param=asked[1][2])
    if not asked:
        return None, ""
    kind, value, param = asked[0]
    return _spec(kind, value, param, limits), param


def check_schema(schema: object, limits: Limits, param: str) -> None:
    """Bounds a JSON schema, by a walk that does not recurse. Its meaning is the grammar compiler's to judge.

    Raises:
        ApiError: 400 if it is nested too deep or has too many parts.
    """
    nodes, rest = 0, [(schema, 1)]
    while rest:
        item, depth = rest.pop()
        children: Sequence[object] = (
            list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else ()
        )
        nodes += 1
        if nodes + len(rest) + len(children) > limits.schema_nodes:
            raise _too_large(param, "has too many parts", f"{limits.schema_nodes} are allowed")
        if depth > limits.schema_depth and isinstance(item, dict | list):
            raise _too_large(param, "is nested too deep", f"{limits.schema_depth} levels are allowed")
        rest.extend((child, depth + 1) for child in children)


def _spec(kind: GrammarKind, value: object, param: str, limits: Limits) -> GrammarSpec:
    if kind == "json_object":
        return GrammarSpec(kind)
    if kind == "json_schema":
        if isinstance(value, str):
            value = _parsed(value, param, limits)
        check_schema(value, limits, param)
    if kind == "choice" and isinstance(value, list) and len(value) > limits.schema_nodes:
        raise _too_large(param, f"has {len(value)} texts", f"{limits.schema_nodes} are allowed")
    source = value if isinstance(value, str) else _dumped(value, param)
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param} is no valid Unicode: it holds half of a surrogate pair.", param=param) from error
    if not source:
        raise ApiError(400, f"{param} is empty; leave it out if the answer may be any text.", param=param)
    if size > limits.schema_bytes:
        raise _too_large(param, f"has {size:,} bytes", f"{limits.schema_bytes:,} are allowed")
    return GrammarSpec(kind, source)


def _parsed(text: str, param: str, limits: Limits) -> dict[str, Any]:
    if len(text) > limits.schema_bytes:
        raise _too_large(param, f"has {len(text):,} characters", f"{limits.schema_bytes:,} bytes are allowed")
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"{param} is no JSON: {error.msg[:80]}.", param=param) from error
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} is no JSON schema; it must be an object.", param=param)
    return schema


def _dumped(value: object, param: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise ApiError(400, f"{param} cannot be written as JSON; its texts must be Unicode.", param=param) from error


def _too_large(param: str, what: str, allowed: str) -> ApiError:
    return ApiError(400, f"{param} {what}; at most {allowed}.", param=param, code="constraint_too_large")
