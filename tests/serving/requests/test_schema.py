"""The bodies' models: strict types, errors that name the field in few words, bounds that are those of the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.sampling_params import SamplingParams
from hookline.serving.api_errors import ApiError
from hookline.serving.requests.bodies import Body, check_fields
from hookline.serving.requests.schema import ChatBody, CompletionsBody, DetokenizeBody, TokenizeBody
from tests.serving.values import ANY, CHAT, CHAT_BAD, COMPLETIONS, COMPLETIONS_BAD, HUGE, MESSAGES


def refused(body: type[Body], data: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body.parse(data)  # type: ignore[arg-type]
    return caught.value


FIELD_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": True}, "temperature", "temperature is true; it must be a number."),
    ({"temperature": "1"}, "temperature", "temperature is '1'; it must be a number."),
    ({"temperature": math.nan}, "temperature", "temperature is nan; it must be a finite number."),
    ({"max_tokens": 1.0}, "max_tokens", "max_tokens is 1.0; it must be a whole number."),
    ({"n": 0}, "n", "n is 0; it must be at least 1."),
    ({"stream": 1}, "stream", "stream is 1; it must be true or false."),
    ({"stop": ["a", 5]}, "stop[1]", "stop[1] is 5; it must be text."),
    ({"stop": 5}, "stop", "stop is 5; it must be text or a list."),
    ({"logit_bias": {"7": "x"}}, "logit_bias.7", "logit_bias.7 is 'x'; it must be a number."),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing."),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content", "must be text or a list."),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
        "messages[0].content[1].type is 'image_url'; it must be 'text'.",
    ),
    (
        {"messages": [{"role": "robot", "content": "a"}]},
        "messages[0].role",
        "it must be 'system', 'developer', 'user', 'assistant' or 'tool'.",
    ),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "tool_choice.function is missing."),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema is missing.",
    ),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "it must be text or an object."),
]


@pytest.mark.parametrize(("fields", "param", "text"), FIELD_ERRORS)
def test_errors_name_the_field_by_its_path(fields: dict[str, Any], param: str, text: str) -> None:
    error = refused(ChatBody, {**CHAT, **fields})
    assert (error.status, error.param) == (400, param)
    assert error.message.endswith(text)


def test_a_missing_field_and_a_body_that_is_no_object() -> None:
    assert refused(ChatBody, {}).param == "messages"
    assert refused(CompletionsBody, {}).message == "prompt is missing."
    assert refused(DetokenizeBody, {"tokens": "a"}).param == "tokens"
    assert refused(ChatBody, []).status == 400


def test_errors_do_not_repeat_what_is_huge() -> None:
    for data in ({"stop": HUGE}, {"stop": [HUGE]}, {"temperature": HUGE}, {"n": 10**4000}, {"model": [HUGE]}):
        assert len(refused(ChatBody, {**CHAT, **data}).message) < 200
    error = refused(ChatBody, {**CHAT, "logit_bias": {HUGE: "x"}})
    assert len(error.message) < 200 and len(error.param or "") < 200


def test_large_lists_and_objects_end_at_the_first_fault() -> None:
    # Were each entry's fault kept, the answer would cost gigabytes and seconds.
    many: list[Any] = [1.5] * 50_000
    names: dict[str, Any] = {str(number): [] for number in range(50_000)}
    for fields in ({"allowed_token_ids": many}, {"stop_token_ids": many}, {"messages": many}, {"logit_bias": names}):
        assert "1.5" in (error := refused(ChatBody, {**CHAT, **fields}).message) or "at most" in error


@pytest.mark.parametrize("body", [ChatBody, CompletionsBody, TokenizeBody, DetokenizeBody])
def test_any_value_is_served_or_refused_and_nothing_else(body: type[Body]) -> None:
    base = {ChatBody: CHAT, CompletionsBody: COMPLETIONS, DetokenizeBody: {"tokens": []}}.get(body, {})
    taken = 0
    for name in body.model_fields:
        for value in ANY:
            try:
                body.parse({**base, name: value})
                taken += 1
            except ApiError as error:
                assert error.status == 400
                assert (error.param or "").startswith(name)
                assert "pydantic" not in error.message and "http" not in error.message
    assert taken > 2 * len(body.model_fields)  # null at least, and another


BOUNDED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def test_the_bounds_are_those_of_the_engine() -> None:
    for name in (*BOUNDED, "n", "prompt_logprobs"):
        of_number = ChatBody.model_json_schema()["properties"][name]["anyOf"][0]
        edges = [of_number.get(key) for key in ("minimum", "maximum", "exclusiveMinimum")]
        low, high, above = edges
        for inside in (edge for edge in (low, high) if edge is not None):
            SamplingParams.from_dict({name: inside})
        outside = [edge for edge in (None if low is None else low - 1, high + 1, above) if edge is not None]
        assert len(outside) == 2
        for value in outside:
            if name == "top_k" and value > 0:
                continue  # the engine takes more, which is as good as all
            with pytest.raises(InvalidRequestError):
                SamplingParams.from_dict({name: value})


def test_the_document_bounds_every_number_and_text_can_be_written_as_json() -> None:
    for body in (ChatBody, CompletionsBody, TokenizeBody, DetokenizeBody):
        document = body.model_json_schema()
        json.dumps(document, allow_nan=False)
        unbounded = [name for name, part in document["properties"].items() if not _is_bounded(part)]
        assert unbounded == []


def _is_bounded(part: Mapping[str, Any]) -> bool:
    if part.get("type") == "integer":
        return "minimum" in part and "maximum" in part
    inner = [*part.get("anyOf", []), *([part["items"]] if "items" in part else [])]
    return all(_is_bounded(one) for one in inner)


def test_every_field_has_values_to_try() -> None:
    ignored = {"user", "metadata", "store", "service_tier", "priority", "safety_identifier", "prompt_cache_key"}
    ignored |= {"prompt_cache_retention", "verbosity"}
    assert set(ChatBody.model_fields) - set(CHAT_BAD) == ignored
    assert set(CompletionsBody.model_fields) - set(COMPLETIONS_BAD) == ignored


def test_unknown_fields_are_left_aside_or_named() -> None:
    message = {"role": "user", "content": "hi", "mood": "good", "refusal": None}
    body = ChatBody.parse({"messages": [message], "colour": 1, "user": "me", "stream_options": {"x": 1}})
    check_fields(body, strict=False)
    with pytest.raises(ApiError, match=r"colour, stream_options\.x, messages\[0\]\.mood\.") as caught:
        check_fields(body, strict=True)
    assert (caught.value.param, caught.value.code) == ("colour", "unknown_field")
    many = ChatBody.parse({**CHAT, **{f"{HUGE}{number}": 1 for number in range(50)}})
    with pytest.raises(ApiError, match="and 40 more") as caught:
        check_fields(many, strict=True)
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [("chat_template", "x"), ("best_of", 2), ("best_of", True), ("suffix", "b"), ("documents", [{}]), ("audio", {})],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"{name} is not supported") as caught:
        check_fields(ChatBody.parse({**CHAT, name: value}), strict=False)
    assert caught.value.param == name
    check_fields(ChatBody.parse({**CHAT, name: None, "best_of": 1, "suffix": ""}), strict=False)
