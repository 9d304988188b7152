"""Answers put together at random from what the parsers look for: how they come in pieces changes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import pytest

from hookline.parsers.contract import ReasoningFormat, ToolFormat
from hookline.parsers.hermes import HermesFormat
from hookline.parsers.think import ThinkFormat
from hookline.plugins import PluginRegistry
from tests.parsers.reading import random_cuts, read_calls, read_reasoning

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"t": {"type": "string"}}}}}]
SPACE = (" ", "\n", "\u00a0", "\x1f", "x", "é", "<", "</", "")
HERMES = (
    *(
        '<tool_call>{"name": "f", "arguments": {',
        '"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"name": "f"}',
        '{"arguments": {',
    ),
    *("<tool_call>", "</tool_call>", "<tool_c", "all>", '"name"', '"arguments"', '"parameters"', '"f"', ": ", ", "),
    *('"a": 1', '"', "\\", "\\u00e9", "\\ud800", "{", "}", "}}", "[", "]", "null", "NaN", "-1", "e5", "tru"),
)
GLM = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool", "_call>"),
    *("<arg_", "key>", "value>", "f", "t", "<tool_call>f<arg_key>t</arg_key><arg_value>", "{", '"', "1", "NaN"),
)
THINK = ("<think>", "</think>", "<thi", "nk>", "</thi", "<tool_call>", "<tool_", "call>")


def glm_tools() -> ToolFormat:
    found = PluginRegistry().load("GlmMoeDsaForCausalLM").tool_format("glm45")
    assert found is not None
    return found


def glm_reasoning() -> ReasoningFormat:
    found = PluginRegistry().load("GlmMoeDsaForCausalLM").reasoning_format("glm45")
    assert found is not None
    return found


def answers(words: Sequence[str], seed: int, count: int) -> Iterator[str]:
    drawn = random.Random(seed)
    for _ in range(count):
        yield "".join(drawn.choices((*words, *SPACE), k=drawn.randint(1, 16)))


def is_object(text: str) -> bool:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("make", "words", "only_last"), [(HermesFormat, HERMES, False), (glm_tools, GLM, True)], ids=["hermes", "glm45"]
)
def test_calls(make: Callable[[], ToolFormat], words: Sequence[str], only_last: bool) -> None:
    """However they are cut; of GLM's only the last can be cut short, for the next one's beginning ends a call."""
    style, found, whole_calls = make(), 0, 0
    for seed, text in enumerate(answers(words, 0, 1500)):
        whole = read_calls(style.parser(TOOLS), [text])
        for pieces in random_cuts(text, seed, count=3):
            assert read_calls(style.parser(TOOLS), pieces) == whole, (text, pieces)
        sound = [is_object(arguments) for _, arguments in whole[1]]
        assert all(sound[:-1]) or not only_last, (text, whole)
        found, whole_calls = found + len(sound), whole_calls + sum(sound)
    assert found > whole_calls > 30  # some were cut short


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [ThinkFormat, glm_reasoning], ids=["think", "glm45"])
def test_reasoning(make: Callable[[], Any], inside: bool) -> None:
    style, parts = make(), 0
    for seed, text in enumerate(answers(THINK, 1, 1500)):
        text = text if seed % 2 else f"<think>{text}"
        whole = read_reasoning(style.parser(inside), [text])
        for pieces in random_cuts(text, seed, count=3):
            assert read_reasoning(style.parser(inside), pieces) == whole, (text, pieces)
        reasoning, rest = whole
        assert text.endswith(rest) and reasoning in text
        parts += bool(reasoning and rest)
    assert parts > 50
