"""Our OpenAPI document: the bodies as pydantic describes them, and the answers, which no model is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/"
_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_ERRORS = {
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "No key, or a wrong one.",
    404: "There is no such model or route.",
    405: "The route has other methods.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests wait; see Retry-After.",
    431: "The head is too large.",
    500: "A fault of the server's; the log has it under the id.",
    503: "The model loads, the server shuts down, or a deadline has passed; see Retry-After.",
}


def _object(**fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"{_REF}{name}"}


def _answers() -> dict[str, Any]:
    """Schemas of what we send, by name."""
    ending = {"finish_reason": _MAYBE_TEXT, "stop_reason": {"type": ["string", "integer", "null"]}}
    head = {"id": _TEXT, "object": _TEXT, "created": _WHOLE, "model": _TEXT, "usage": _ref("Usage")}
    logprobs = {"type": ["object", "null"]}
    message = _object(role=_TEXT, content=_MAYBE_TEXT)
    model = _object(id=_TEXT, object=_TEXT, created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE)
    return {
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)),
        "Usage": _object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE),
        "ChatCompletion": _object(
            **head, choices=_list(_object(index=_WHOLE, message=message, logprobs=logprobs, **ending))
        ),
        "Completion": _object(**head, choices=_list(_object(index=_WHOLE, text=_TEXT, logprobs=logprobs, **ending))),
        "Model": model,
        "ModelList": _object(object=_TEXT, data=_list(_ref("Model"))),
        "TokenizeAnswer": _object(tokens=_list(_WHOLE), count=_WHOLE, max_model_len=_WHOLE),
        "DetokenizeAnswer": _object(prompt=_TEXT),
        "TokenizerInfo": {"type": "object"},
        "Version": _object(version=_TEXT),
        "Plugins": _object(plugins=_list({"type": "object"})),
        "DeepHealth": _object(status=_TEXT, seconds=_NUMBER, age_seconds=_NUMBER),
    }


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with this body."""
    content = {"application/json": {"schema": _ref(body.__name__)}}
    return {"requestBody": {"required": True, "content": content}}


def gives(name: str, *statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its answer by name, and the errors beside those that every route has."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(name)}}
    if streams:
        content["text/event-stream"] = {"itemSchema": _object(data=_TEXT)}
    error = {"application/json": {"schema": _ref("Error")}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    for status in sorted({400, 401, 404, 405, 431, 500, 503, *statuses}):
        found[status] = {"description": _ERRORS[status], "content": error}
    return found


def complete(document: dict[str, Any], bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """`document` with the schemas that its routes name, and the key."""
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=f"{_REF}{{model}}")
    components = document.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **definitions.get("$defs", {}), **_answers()}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document
