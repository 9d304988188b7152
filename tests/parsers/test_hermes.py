"""Tool calls as JSON between tags: what is a call, what is content, in whatever pieces they come."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import xgrammar

from hookline.parsers.contract import ToolCallDelta, ToolFormat
from hookline.parsers.hermes import HermesFormat
from hookline.parsers.json_scanner import JsonObjectScanner
from tests.parsers.reading import Call, grows_evenly, random_cuts, read_calls

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SOUND: list[tuple[str, str, list[Call]]] = [
    ("Hello.", "Hello.", []),
    (" \n", " \n", []),
    (CALL, "", [("get_weather", '{"city": "Oslo"}')]),
    (f"Let me see. {CALL}", "Let me see. ", [("get_weather", '{"city": "Oslo"}')]),
    (f"\n{CALL}\n{CALL}\n", "", [("get_weather", '{"city": "Oslo"}')] * 2),
    (f"{CALL} There.", " There.", [("get_weather", '{"city": "Oslo"}')]),
    (
        '<tool_call>{"arguments": {"x": [1, {"y": null}]}, "name": "f"}</tool_call>',
        "",
        [("f", '{"x": [1, {"y": null}]}')],
    ),
    ('<tool_call>{"id": 7, "name": "f", "parameters": {}, "more": [{}]}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', "", [("f", '{"a": "é"}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    (
        r'<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\"{", "b": "\\"}}</tool_call>',
        "",
        [("f", r'{"a": "}</tool_call>\"{", "b": "\\"}')],
    ),
    ('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    ('<tool_call>{"name": "f"} well</tool_call>!', " well</tool_call>!", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g", "arguments": {}}', "", [("f", '{"a": 1}')]),
]
BROKEN = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>get_weather</tool_call>",
    "<tool_call>{'name': 'f'}</tool_call>",
    '<tool_call>{"name": "f",}</tool_call>',
    '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": tru}, "name": "f"}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "argum',
    '</tool_call>{"name": "f"}',
    "a < b, <tool and <tool_cal",
]
CUT: list[tuple[str, str, list[Call]]] = [
    ('<tool_call>{"name": "f", "arguments": {"a": "some', "", [("f", '{"a": "some')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_', "", [("f", "{}")]),
    ('<tool_call>{"name": "f"},{"name": "g', ',{"name": "g', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', '\ny"}}', [("f", '{"a": "x')]),
]


def read(text: str) -> tuple[str, list[Call]]:
    return read_calls(HermesFormat().parser(TOOLS), [text])


@pytest.mark.parametrize(("text", "content", "calls"), [*SOUND, *CUT])
def test_calls_and_content(text: str, content: str, calls: list[Call]) -> None:
    assert read(text) == (content, calls)


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_call_is_content_as_it_stands(text: str) -> None:
    assert read(f" {text} so") == (f" {text} so", [])


def test_the_pieces_do_not_matter() -> None:
    texts = [text for text, _, _ in [*SOUND, *CUT]] + BROKEN
    for seed, (first, second) in enumerate(itertools.product(texts, texts[::3])):
        text = f"{first}{second}"
        whole = read(text)
        for pieces in random_cuts(text, seed, count=4):
            assert read_calls(HermesFormat().parser(TOOLS), pieces) == whole


def test_a_call_comes_as_it_is_written() -> None:
    parser = HermesFormat().parser(TOOLS)
    assert parser.push('See: <tool_call>\n{"name": "get_weather", "argu') == ("See: ", ())
    assert parser.push('ments": ') == ("", ())
    assert parser.push("{") == ("", (ToolCallDelta(0, "get_weather", "{"),))
    assert parser.push('"city": "Os') == ("", (ToolCallDelta(0, None, '"city": "Os'),))
    assert parser.push('lo"}}') == ("", (ToolCallDelta(0, None, 'lo"}'),))
    assert parser.push("\n</tool_call>") == ("", ())
    assert parser.flush() == ("", ())


def test_plain_text_is_not_held_back() -> None:
    parser = HermesFormat().parser(TOOLS)
    assert [parser.push(piece)[0] for piece in ("a", " b", "<tool", "s>", "<")] == ["a", " b", "", "<tools>", ""]
    assert parser.flush() == ("<", ())


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "</tool_call>", "<tool_cal", " ", "{", CALL, '<tool_call>{"name": "f"},', '<tool_call>{"'],
)
def test_work_grows_with_the_text_alone(text: str) -> None:
    assert grows_evenly(lambda whole: read_calls(HermesFormat().parser([]), whole), text)
    assert grows_evenly(read, text)


@pytest.mark.parametrize("start", ['{"name": "f", "arguments": {"a": ', '{"arguments": {"a": '])
@pytest.mark.parametrize("text", ["[", '"x, ', "1"])
def test_work_within_arguments_grows_with_the_text_alone(start: str, text: str) -> None:
    assert grows_evenly(lambda whole: read_calls(HermesFormat().parser([]), f"<tool_call>{start}{whole}"), text)


SAMPLES = [
    *('{"a": 1}', "{}", '{ "a" : [ ] , "b":{"c":[1,-2.5e+7,0,true,false,null,"\\u00E9\\n"]}}', '{"a": 1 }'),
    *('{"a": 01}', '{"a": .5}', '{"a": 1.}', '{"a": NaN}', '{"a": "\\x"}', '{"a": "\\u12g4"}', '{"a": "\t"}', "[1]"),
    *("{,}", '{"a"}', '{"a":}', '{"a": 1,}', '{"a": [1,]}', '{"a": [1}', '{"a" 1}', "{a: 1}", '{"a": 1 2}', '{"a": "'),
]


@pytest.mark.parametrize("text", SAMPLES)
def test_the_scanner_agrees_with_the_standard_library(text: str) -> None:
    def is_object(text: str) -> bool:
        try:
            return isinstance(json.loads(text, parse_constant=lambda _: 1 / 0), dict)
        except (ValueError, ZeroDivisionError):
            return False

    scanner, at, stop = JsonObjectScanner(), 0, "begin"
    while stop in ("begin", "end"):
        at, stop = scanner.scan(text, at)
    assert (stop == "object") == is_object(text)
    assert stop != "object" or at == len(text)


def accepts(name: str | None, parallel: bool, text: str) -> bool:
    spec = HermesFormat().constraint(TOOLS, name, parallel)
    assert spec is not None
    assert spec.kind == "structural_tag"
    information = xgrammar.TokenizerInfo([])
    compiled = xgrammar.GrammarCompiler(information).compile_structural_tag(spec.source)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("text", [CALL, TIME, CALL.replace('"}', '", "days": 3}')])
def test_the_constraint_takes_calls_that_are_then_read(text: str) -> None:
    assert accepts(None, True, text)
    assert accepts(None, False, text)
    assert accepts("get_time", False, text) == (text == TIME)
    content, calls = read(text)
    assert content == ""
    assert len(calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "Hello.", f"Let me see. {CALL}", f"{CALL} and", CALL.replace("get_weather", "get")),
        *(CALL.replace('"Oslo"', "5"), CALL.replace("city", "town"), TIME.replace("{}", '{"zone": 1}')),
    ],
)
def test_the_constraint_refuses(text: str) -> None:
    assert not accepts(None, True, text)


def test_several_calls_only_where_they_are_allowed() -> None:
    assert accepts(None, True, f"{CALL}\n{TIME}")
    assert not accepts(None, False, f"{CALL}\n{TIME}")
    assert not accepts("get_time", True, f"{TIME}\n{TIME}")
    assert HermesFormat().constraint([], None, True) is None


def test_it_is_a_format() -> None:
    assert isinstance(HermesFormat(), ToolFormat)
    assert set(HermesFormat().markers) == {"<tool_call>", "</tool_call>"}
