"""Reasoning between two markers: where it begins and ends, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from hookline.parsers.contract import ReasoningFormat
from hookline.parsers.scanning import Content, MarkedText, Markers
from hookline.parsers.think import ThinkFormat
from tests.parsers.reading import grows_evenly, random_cuts, read_reasoning

IDS = {"<think>": 1, "</think>": 2, "\n": 3}
CASES = [
    # Whether the prompt opened it, the answer, the reasoning, the rest.
    (False, "Hello.", "", "Hello."),
    (False, "<think>Sum: 3.</think>It is 3.", "Sum: 3.", "It is 3."),
    (False, "\n <think>\nSum.\n</think>\n\nThree.", "\nSum.\n", "\n\nThree."),
    (False, "  Hello.", "", "  Hello."),
    (False, " \n", "", " \n"),
    (False, "", "", ""),
    (False, "A <think> in text</think>", "", "A <think> in text</think>"),
    (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (False, "<thin", "", "<thin"),
    (False, "<tea", "", "<tea"),
    (False, "<think>a</thi", "a</thi", ""),
    (False, "<think></think>b", "", "b"),
    (True, "Sum: 3.</think>It is 3.", "Sum: 3.", "It is 3."),
    (True, "<think>Sum.</think>It.", "Sum.", "It."),
    (True, "a < b </ think <think> </think></think>", "a < b </ think <think> ", "</think>"),
    (True, "Cut sho", "Cut sho", ""),
    (True, "</think>b", "", "b"),
    (True, " <t", " <t", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "rest"), CASES)
def test_reasoning_and_rest_in_all_pieces(inside: bool, text: str, reasoning: str, rest: str) -> None:
    for pieces in random_cuts(text, seed=len(text)):
        assert read_reasoning(ThinkFormat().parser(inside), pieces) == (reasoning, rest)


def test_another_marker_ends_reasoning_and_stays() -> None:
    style = ThinkFormat(also_end=("<tool_call>",))
    for pieces in random_cuts("I call.<tool_call>f</tool_call></think>", seed=1):
        assert read_reasoning(style.parser(True), pieces) == ("I call.", "<tool_call>f</tool_call></think>")


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = ThinkFormat().parser(False)
    assert parser.push("<thi") == ("", "")
    assert parser.push("nk>So") == ("So", "")
    assert parser.push(" it is <") == (" it is ", "")
    assert parser.push("/thin") == ("", "")
    assert parser.push("g></think>Three") == ("</thing>", "Three")
    assert parser.push("<think>") == ("", "<think>")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ([], False),
        ([7, 8], False),
        ([7, 1], True),
        ([1, 9, 2, 8], False),
        ([2, 1, 3, 3], True),
        ([2, 1, 7, 3], False),
        ([1, 2, 1], True),
    ],
)
def test_a_prompt_that_ends_with_the_marker_begins_inside(prompt: list[int], inside: bool) -> None:
    assert ThinkFormat().starts_inside(prompt, IDS.get) is inside


def test_a_vocabulary_without_the_markers_has_no_reasoning_in_prompts() -> None:
    assert not ThinkFormat().starts_inside([1, 2, 3], lambda _: None)


@pytest.mark.parametrize("text", ["<think>", "</think>", "</thin", "<", " ", "a </"])
@pytest.mark.parametrize("inside", [True, False])
def test_work_grows_with_the_text_alone(inside: bool, text: str) -> None:
    assert grows_evenly(lambda whole: read_reasoning(ThinkFormat().parser(inside), whole), text)


def test_it_is_a_format() -> None:
    style = ThinkFormat()
    assert isinstance(style, ReasoningFormat)
    assert (style.end, set(style.markers)) == ("</think>", {"<think>", "</think>"})


@pytest.mark.parametrize("texts", [("",), ("<a>", "<a>b"), ("ab", "a")])
def test_markers_that_hide_another_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no marker may be empty or the beginning of another"):
        Markers(*texts)


def test_marked_text_is_read_marker_by_marker() -> None:
    text, markers = MarkedText(), Markers("<a>", "</a>")
    text.push("x<a>y</")
    assert [text.read(markers) for _ in range(3)] == [("x", "<a>"), ("y", ""), ("", "")]
    text.push("a><")
    assert text.read(markers) == ("", "</a>")
    assert text.read(markers) == ("", "")
    assert text.rest() == "<"
    assert text.rest() == ""


def test_space_around_calls_is_no_content() -> None:
    content = Content()
    assert [content.push(piece) for piece in (" ", "\n", "a", " ")] == ["", "", " \na", " "]
    content.call()
    assert [content.push(piece) for piece in ("\n", "")] == ["", ""]
    assert content.flush() == ""
    assert content.push("b") == "\nb"
