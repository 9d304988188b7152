"""What all bodies share: strict types, errors that name the field, and what becomes of fields that are not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from hookline.serving.api_errors import ApiError

# Fields that other servers know and that change the answer, so that leaving them aside would be wrong: the values that
# ask for nothing, and what to do instead.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "chat_template": ((), "chat templates come from the model alone"),
        "suffix": (("",), "text is only continued, never filled in"),
        "best_of": ((1,), "ask for n answers"),
        "use_beam_search": ((False,), "answers are sampled; there is no beam search"),
        "prompt_embeds": ((), "give text or token ids"),
        "logits_processors": ((), "use logit_bias, bad_words or allowed_token_ids"),
        "documents": (([],), "put the documents into a message"),
        "functions": (([],), "give tools"),
        "function_call": (("none",), "give tool_choice"),
        "modalities": ((["text"],), "answers are text"),
        "audio": ((), "answers are text"),
    }
)
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "text",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
        "greater_than_equal": "at least {ge}",
        "less_than_equal": "at most {le}",
        "greater_than": "above {gt}",
        "literal_error": "{expected}",
        "too_long": "a list of at most {max_length} entries",
        "value_error": "{error}",
        "too_short": "a list that is not empty",
        "string_too_long": "text of at most {max_length} characters",
        "string_too_short": "text that is not empty",
        "string_pattern_mismatch": "text that matches {pattern}",
    }
)
_MOST_SHOWN = 60


class Body(BaseModel):
    """Base of all objects in a body. Fields that are not declared are kept, for `check_fields` to judge."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """The body that parsed JSON holds.

        Raises:
            ApiError: 400, naming the first field at fault.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise body_error(error, data) from error


def at_most(most: int) -> BeforeValidator:
    """Bounds an object before its entries are looked at, which pydantic does first."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"an object of at most {most} entries")
        return value

    return BeforeValidator(check)


def check_fields(body: Body, *, strict: bool) -> None:
    """Refuses fields that cannot be left aside, and with `strict` all that are not known.

    Raises:
        ApiError: 400, naming them.
    """
    for name, value in (body.model_extra or {}).items():
        neutral, reason = _REFUSED.get(name, ((value,), ""))
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise ApiError(400, f"{name} is not supported: {reason}.", param=name, code="unsupported_field")
    if strict and (names := [shorten(name) for name in _unknown(body, "")]):
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise ApiError(
            400,
            f"This server refuses fields that it does not know: {', '.join(names[:10])}{more}. Leave them out.",
            param=names[0],
            code="unknown_field",
        )


def body_error(error: ValidationError, data: object) -> ApiError:
    """What a client is told of a body that is not of its model's shape: of the first field at fault alone.

    Args:
        data: what was parsed; tells which parts of pydantic's location are parts of the body.
    """
    details = error.errors(include_url=False)
    found = [(_path(detail["loc"], data, missing=detail["type"] == "missing"), detail) for detail in details]
    first = found[0][0]
    # The alternatives of one value each have their faults: those of the one that came furthest tell the most.
    related = [entry for entry in found if entry[0][: len(first)] == first]
    path = max((entry[0] for entry in related), key=len)
    wanted, value = list[str](), None
    for place, detail in related:
        if place == path:
            value = detail["input"]
            if detail["type"] == "missing":
                return ApiError(400, f"{_spell(path)} is missing.", param=_spell(path), code="missing_field")
            context = {key: shorten(str(part)) for key, part in detail.get("ctx", {}).items()}
            text = _KINDS.get(detail["type"], "{message}").format(message=detail["msg"], **context)
            wanted.extend([text] if text not in wanted else [])
    name = _spell(path)
    what = f"{name or 'the body'} is {show(value)}; it must be {' or '.join(wanted)}."
    return ApiError(400, what, param=name or None, code="invalid_type")


def show(value: object) -> str:
    """A client's value in an error's text, cut to a few words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(shorten(value))
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return f"of type {type(value).__name__}"


def shorten(text: str) -> str:
    """At most a line of `text`."""
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _path(location: tuple[int | str, ...], data: object, *, missing: bool) -> tuple[int | str, ...]:
    """The parts of pydantic's location that lead through the body; others name alternatives of a type."""
    path: list[int | str] = []
    for number, part in enumerate(location):
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]  # type: ignore[index]
        elif not (missing and number == len(location) - 1):
            continue
        path.append(part)
    return tuple(path)


def _spell(path: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in path)
    return text.removeprefix(".")


def _unknown(body: Body, prefix: str) -> Iterator[str]:
    for name in body.model_extra or {}:
        yield f"{prefix}{name}"
    for name, field in type(body).model_fields.items():
        value, spelling = getattr(body, name), field.alias or name
        if isinstance(value, Body):
            yield from _unknown(value, f"{prefix}{spelling}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Body):
                    yield from _unknown(item, f"{prefix}{spelling}[{number}].")
