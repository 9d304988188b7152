"""The one door, of chats: conversations as templates read them, tools, reasoning, and constraints. No engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hookline.serving.requests.validate import Validator
from tests.serving.small_door import (
    TOOL_TEMPLATE,
    CallFormat,
    ThinkFormat,
    chat,
    complete,
    only,
    refused,
    small_door,
    small_tokenizer,
)
from tests.serving.values import SCHEMA, TOOL

OTHER_TOOL = {"type": "function", "function": {"name": "clock", "description": "time", "strict": True}}


@pytest.fixture(scope="module")
def door() -> Validator:
    return small_door(small_tokenizer(TOOL_TEMPLATE))


# -- conversations -----------------------------------------------------------------------------------------------------


def rendered(door: Validator, **fields: Any) -> str:
    assert door.tokenizer is not None
    return door.tokenizer.decode(only(chat(door, **fields)).token_ids, skip_special_tokens=False)


def test_a_conversation_as_templates_read_it(door: Validator) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "n": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "rain", "reasoning": "ok"},
    ]
    text = rendered(door, messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert text == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        '<|im_start|>assistant\n[hm|hm]<call>weather city="Oslo" n=1</call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n[ok|ok]rain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not rendered(door, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize("arguments", ["[1]", "{", "null", "nonsense", "[" * 5000])
def test_arguments_that_are_no_object_are_for_the_template_to_judge(door: Validator, arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}
    assert refused(door, "chat", messages=[message]).param == "messages"  # this one walks through them
    nested = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "a", "arguments": '{"a":' * 90 + "1" + "}" * 90}}],
    }
    assert refused(door, "chat", messages=[nested]).param == "messages"


def test_empty_arguments_are_an_empty_object(door: Validator) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": ""}}]}
    assert "<call>a</call>" in rendered(door, messages=[message])


def test_template_variables(door: Validator) -> None:
    assert rendered(door).endswith("<think>")
    assert not rendered(door, chat_template_kwargs={"enable_thinking": False}).endswith("<think>")
    assert "effort high" in rendered(door, reasoning_effort="high")
    assert not rendered(door, reasoning_effort="none").endswith("<think>")
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert rendered(door, **both).endswith("<think>")
    error = refused(door, "chat", chat_template_kwargs={"enable_thinking": True, "mood": 1})
    assert error.param == "chat_template_kwargs.mood" and "enable_thinking, reasoning_effort" in error.message
    # A checkpoint without this token leaves its name to its template as a free variable.
    assert refused(door, "chat", chat_template_kwargs={"bos_token": "x"}).param == "chat_template_kwargs.bos_token"
    assert chat(small_door(), reasoning_effort="high").prompts  # its template knows no effort


def test_a_template_that_refuses_or_is_stopped() -> None:
    refuses = small_door(small_tokenizer("{{ raise_exception('no system turns') }}"))
    error = refused(refuses, "chat")
    assert error.param == "messages" and "no system turns" in error.message
    assert refused(small_door(small_tokenizer("{% for a in range(10**9) %}{% endfor %}")), "chat").param == "messages"
    assert refused(small_door(small_tokenizer("")), "chat").param == "messages"
    assert refused(small_door(small_tokenizer(None)), "chat").param == "messages"


# -- tools, reasoning, constraints -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def able() -> Validator:
    tokenizer = small_tokenizer(TOOL_TEMPLATE)
    return small_door(tokenizer, tool_format=CallFormat(), reasoning_format=ThinkFormat())


def test_tools(able: Validator) -> None:
    call = chat(able, tools=[TOOL, OTHER_TOOL])
    assert call.tools is not None and call.tools.tools == (TOOL, OTHER_TOOL)
    assert (call.tools.choice, call.tools.parallel, only(call).grammar) == ("auto", True, None)
    text = rendered(able, tools=[TOOL, OTHER_TOOL])
    shown = {"name": "clock", "description": "time"}  # `strict` is for the server
    assert json.dumps([TOOL, {"type": "function", "function": shown}]) in text
    none = chat(able, tools=[TOOL], tool_choice="none")
    assert none.tools is None and "weather" not in rendered(able, tools=[TOOL], tool_choice="none")
    assert chat(able, tools=[]).tools is None
    single = chat(able, tools=[TOOL], parallel_tool_calls=False).tools
    assert single is not None and not single.parallel


def test_forced_calls(able: Validator) -> None:
    request = only(chat(able, tools=[TOOL, OTHER_TOOL], tool_choice="required"))
    assert request.grammar is not None and request.grammar.source == "<call>(weather|clock)</call>+"
    named = {"type": "function", "function": {"name": "clock"}}
    call = chat(able, tools=[TOOL, OTHER_TOOL], tool_choice=named, parallel_tool_calls=False)
    assert call.tools is not None and call.tools.choice == "clock"
    assert (grammar := only(call).grammar) is not None and grammar.source == "<call>(clock)</call>"
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tools": [TOOL], "tool_choice": named}):
        assert refused(able, "chat", **fields).param == "tool_choice"
    cannot = small_door(tool_format=CallFormat(forces=False))
    assert refused(cannot, "chat", tools=[TOOL], tool_choice="required").param == "tool_choice"


def test_tools_without_a_parser_name_the_option(door: Validator) -> None:
    for choice in (None, "auto", "required"):
        error = refused(door, "chat", tools=[TOOL], tool_choice=choice)
        assert error.param == "tools" and "--tool-parser" in error.message
    assert chat(door, tools=[TOOL], tool_choice="none").prompts


def test_a_prompt_that_opens_no_answer_opens_no_thought(able: Validator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its last words are."""
    monkeypatch.setattr(type(able._reasoning_format), "starts_inside", lambda *given: True)
    assert chat(able).starts_in_reasoning
    assert not chat(able, add_generation_prompt=False).starts_in_reasoning


def test_reasoning(able: Validator) -> None:
    inside = chat(able)
    assert inside.starts_in_reasoning and inside.reasoning == "separate"
    assert not chat(able, chat_template_kwargs={"enable_thinking": False}).starts_in_reasoning
    assert chat(able, include_reasoning=False).reasoning == "drop"
    assert chat(able, separate_reasoning=False, include_reasoning=False).reasoning == "content"
    assert chat(small_door()).reasoning == "content" and complete(able).reasoning == "content"


def test_reasoning_has_the_names_that_the_operator_wants(able: Validator) -> None:
    assert chat(able).reasoning_fields == ("reasoning", "reasoning_content")
    for name in ("reasoning", "reasoning_content"):
        config = dataclasses.replace(able.config, reasoning_fields=name)
        assert chat(Validator(able.facts, able.tokenizer, config, None, None)).reasoning_fields == (name,)


def test_a_constraint_begins_behind_the_reasoning(able: Validator) -> None:
    shape = {"type": "json_object"}
    assert only(chat(able, response_format=shape)).grammar_after == 260
    off = only(chat(able, response_format=shape, reasoning_effort="none"))
    assert off.grammar is not None and off.grammar_after is None
    assert only(chat(able)).grammar_after is None
    assert only(chat(able, tools=[TOOL], tool_choice="required")).grammar_after == 260
    tokenizer = small_tokenizer(TOOL_TEMPLATE)
    no_token = small_door(tokenizer, reasoning_format=ThinkFormat(end="</thought>"))
    assert refused(no_token, "chat", response_format=shape).param == "response_format"


def test_markers_that_are_special_tokens_stay_in_the_text() -> None:
    tokenizer, special = small_tokenizer(TOOL_TEMPLATE), ("<|endoftext|>",)
    tools = small_door(tokenizer, tool_format=CallFormat(special))
    assert only(chat(tools)).params.skip_special_tokens
    assert not only(chat(tools, tools=[TOOL], skip_special_tokens=True)).params.skip_special_tokens
    assert only(chat(tools, tools=[TOOL], tool_choice="none")).params.skip_special_tokens
    thinks = small_door(tokenizer, reasoning_format=ThinkFormat(special))
    assert not only(chat(thinks)).params.skip_special_tokens
    assert only(chat(thinks, separate_reasoning=False)).params.skip_special_tokens
    assert only(complete(thinks)).params.skip_special_tokens
    ordinary = small_door(tokenizer, tool_format=CallFormat(), reasoning_format=ThinkFormat())
    assert only(chat(ordinary, tools=[TOOL])).params.skip_special_tokens


GRAMMARS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        *("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    ({"guided_json": '{"b": 1, "a": 2}'}, "json_schema", '{"b":1,"a":2}'),
    ({"structured_outputs": {"json": {"b": 1, "a": "é"}}}, "json_schema", '{"b":1,"a":"é"}'),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '["yes","no"]'),
    ({"guided_choice": ["yes"]}, "choice", '["yes"]'),
    ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
]


@pytest.mark.parametrize(("fields", "kind", "source"), GRAMMARS)
def test_each_spelling_of_a_constraint(door: Validator, fields: dict[str, Any], kind: str, source: str) -> None:
    for call in (chat(door, **fields), complete(door, **fields)):
        grammar = only(call).grammar
        assert grammar is not None and (grammar.kind, grammar.source) == (kind, source)


def test_one_constraint_at_a_time(door: Validator, able: Validator) -> None:
    error = refused(door, guided_regex="a", response_format={"type": "json_object"})
    assert error.status == 400 and "response_format and guided_regex" in error.message
    error = refused(able, "chat", tools=[TOOL], response_format={"type": "json_object"})
    assert error.param == "response_format"
    plain = chat(able, tools=[TOOL], tool_choice="required", response_format={"type": "text"})
    assert only(plain).grammar is not None
