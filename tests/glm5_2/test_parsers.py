"""GLM's tool calls and reasoning: the rules of `glm45`, its grammar, and what the trained model writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from hookline import Engine, EngineConfig, SamplingParams
from hookline.parsers.contract import ReasoningFormat, ToolCallDelta, ToolFormat
from hookline.plugins import LoadedArchitecture, PluginRegistry
from tests.parsers.reading import Call, grows_evenly, random_cuts, read_calls, read_reasoning

MODEL = Path(__file__).parent.parent / "data" / "tiny-glm5.2-mtp"


@pytest.fixture(scope="module")
def glm() -> LoadedArchitecture:
    return PluginRegistry().load("GlmMoeDsaForCausalLM")


@pytest.fixture(scope="module")
def style(glm: LoadedArchitecture) -> ToolFormat:
    found = glm.tool_format(glm.record.tool_parser)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def thinking(glm: LoadedArchitecture) -> ReasoningFormat:
    found = glm.reasoning_format(glm.record.reasoning_parser)
    assert found is not None
    return found


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, *pairs: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>{name}{inner}</tool_call>"


TOOLS = [
    tool("f", a={}, text={"type": "string"}),
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}, unit={"enum": ["C", "F"]}),
    {"type": "function", "function": {"name": "now"}},
]
OSLO = call("get_weather", ("city", "Oslo"))
CASES: list[tuple[str, str, list[Call]]] = [
    ("Hello.", "Hello.", []),
    (OSLO, "", [("get_weather", '{"city": "Oslo"}')]),
    (f"I look.\n{OSLO}{OSLO}\n", "I look.\n", [("get_weather", '{"city": "Oslo"}')] * 2),
    (f"{OSLO} Done.", " Done.", [("get_weather", '{"city": "Oslo"}')]),
    (call("now"), "", [("now", "{}")]),
    (call("\nnow \n"), "", [("now", "{}")]),
    (call("other", ("a", "1"), ("b", "x")), "", [("other", '{"a": 1, "b": "x"}')]),
    ("<tool_call>f\n<arg_key> a </arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", [("f", '{"a": 1}')]),
    (call("f", ("", "1"), (" ", "2")), "", [("f", "{}")]),
    ("<tool_call>f<arg_key>a</arg_key><arg_key>text</arg_key><arg_value>x</arg_value>", "", [("f", '{"text": "x"}')]),
    (call("f", ("text", "a</tool_call>b<tool_call>")), "", [("f", '{"text": "a</tool_call>b<tool_call>"}')]),
    # Cut short within a pair: the object stays open. Behind a pair it is closed.
    ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>te", "", [("f", '{"a": 1')]),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "", [("f", '{"a": 1}')]),
    ("<tool_call>f<arg_key>a</arg_key>", "", [("f", "{")]),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>lo", "", [("f", "{")]),
    ("<tool_call>f<arg_key>a</tool_call>", "", [("f", "{}")]),
    # The next call ends one that has no end.
    (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>now</tool_call>",
        "",
        [("f", '{"a": 1}'), ("now", "{}")],
    ),
    # No calls.
    ("<tool_call>now", "<tool_call>now", []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("<tool_call> <arg_key>a</arg_key>", "<tool_call> <arg_key>a</arg_key>", []),
    ("a <tool_call> is <tool_call>now</tool_call>", "a <tool_call> is ", [("now", "{}")]),
    ("</tool_call></arg_value> <tool", "</tool_call></arg_value> <tool", []),
    (" \n", " \n", []),
]
VALUES = [
    ("5", "5"),
    (" 5\n", "5"),
    ("-1.50e3", "-1.50e3"),
    ("true", "true"),
    ("null", "null"),
    ('{"b": [1, "x"]}', '{"b": [1, "x"]}'),
    ("Oslo", '"Oslo"'),
    ("", '""'),
    ("  ", '"  "'),
    ('"quoted"', r'"\"quoted\""'),
    (' a "b" ', r'" a \"b\" "'),
    ("{broken", '"{broken"'),
    ("NaN", '"NaN"'),
    ("[1, Infinity]", '"[1, Infinity]"'),
    ("line\nline", r'"line\nline"'),
    ("é", '"é"'),
    ("9" * 5000, f'"{"9" * 5000}"'),
    ("[" * 100_000, f'"{"[" * 100_000}"'),
]
SCHEMAS: list[tuple[Any, str, str]] = [
    ({"type": "string"}, "5", '"5"'),
    ({"type": ["string"]}, "null", '"null"'),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": "integer"}, "5", "5"),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": ["1", "2"]}, " 1", '"1"'),
    ({"enum": ["1", 1]}, "1", "1"),
    ({"const": "x"}, "x ", '"x"'),
    ({"$ref": "#/$defs/name"}, "5", '"5"'),
    ({"$ref": "#/$defs/a~1b"}, "5", '"5"'),
    ({"$ref": "#/$defs/circle"}, "5", "5"),
    ({"$ref": "#/$defs/nothing"}, "5", "5"),
    ({"allOf": [{"minLength": 1}, {"type": "string"}]}, "5", '"5"'),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/name"}]}, "5", '"5"'),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
    ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "true", '"true"'),
    ({"type": "array", "items": {"type": "string"}}, '[1, "x", {"b": 2}]', r'["1", "x", "{\"b\": 2}"]'),
    ({"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/name"}}, {"type": "null"}]}, "[1]", '["1"]'),
    ({"type": "array", "items": {}}, "[1]", "[1]"),
    (True, "5", "5"),
    ("nonsense", "5", "5"),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_and_content(style: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    assert read_calls(style.parser(TOOLS), [text]) == (content, calls)
    for _, arguments in calls:
        if not text.endswith(("te", "lo", "</arg_key>")):
            assert isinstance(json.loads(arguments), dict)


def test_the_pieces_do_not_matter(style: ToolFormat) -> None:
    texts = [text for text, _, _ in CASES]
    for seed, (first, second) in enumerate(itertools.product(texts, texts)):
        text = f"{first}{second}"
        whole = read_calls(style.parser(TOOLS), [text])
        for pieces in random_cuts(text, seed, count=3):
            assert read_calls(style.parser(TOOLS), pieces) == whole


@pytest.mark.parametrize(("text", "expected"), VALUES, ids=range(len(VALUES)))
def test_values(style: ToolFormat, text: str, expected: str) -> None:
    _, [(_, arguments)] = read_calls(style.parser(TOOLS), [call("f", ("a", text))])
    assert arguments == f'{{"a": {expected}}}'


@pytest.mark.parametrize(("schema", "text", "expected"), SCHEMAS)
def test_the_schema_says_what_is_text(style: ToolFormat, schema: Any, text: str, expected: str) -> None:
    definitions = {"name": {"type": "string"}, "a/b": {"type": "string"}, "circle": {"$ref": "#/$defs/circle"}}
    described = tool("g", a=schema)
    described["function"]["parameters"]["$defs"] = definitions
    _, [(_, arguments)] = read_calls(style.parser([described]), [call("g", ("a", text))])
    assert arguments == f'{{"a": {expected}}}'


def test_properties_are_found_behind_references(style: ToolFormat) -> None:
    parameters = {"$ref": "#/$defs/p", "$defs": {"p": {"allOf": [{"properties": {"a": {"type": "string"}}}]}}}
    described = {"type": "function", "function": {"name": "g", "parameters": parameters}}
    assert read_calls(style.parser([described]), [call("g", ("a", "5"))])[1] == [("g", '{"a": "5"}')]


def test_a_call_grows_by_complete_pairs(style: ToolFormat) -> None:
    parser = style.parser(TOOLS)
    assert parser.push("Look. <tool_call>get_wea") == ("Look. ", ())
    assert parser.push("ther<arg_key>") == ("", (ToolCallDelta(0, "get_weather"),))
    assert parser.push("city</arg_key><arg_value>Os") == ("", ())
    assert parser.push("lo</arg_value><arg_key>days") == ("", (ToolCallDelta(0, None, '{"city": "Oslo"'),))
    assert parser.push("</arg_key><arg_value>3</arg_value>") == ("", (ToolCallDelta(0, None, ', "days": 3'),))
    assert parser.push("</tool_call>") == ("", (ToolCallDelta(0, None, "}"),))
    assert parser.flush() == ("", ())


@pytest.mark.parametrize(
    "text",
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<tool_cal",
            "</arg_",
        ),
        *(OSLO, "<tool_call>f<arg_key>", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ],
)
def test_work_grows_with_the_text_alone(style: ToolFormat, text: str) -> None:
    assert grows_evenly(lambda whole: read_calls(style.parser(TOOLS), whole), text)
    assert grows_evenly(lambda whole: read_calls(style.parser(TOOLS), [whole]), text)


def test_work_within_a_value_grows_with_the_text_alone(style: ToolFormat) -> None:
    start = "<tool_call>f<arg_key>a</arg_key><arg_value>"
    assert grows_evenly(lambda whole: read_calls(style.parser(TOOLS), f"{start}{whole}</arg_value>"), "[<tool_call>")


def test_a_schema_that_branches_again_and_again_is_looked_at_once(style: ToolFormat) -> None:
    definitions: dict[str, Any] = {"d40": {"type": "string"}}
    for number in range(40):
        definitions[f"d{number}"] = {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}, {"$ref": f"#/$defs/d{number + 1}"}]}
    described = tool("g", a={"$ref": "#/$defs/d0"})
    described["function"]["parameters"]["$defs"] = definitions
    # 2**40 looks would not end.
    assert isinstance(read_calls(style.parser([described]), [call("g", ("a", "5"))])[1][0][1], str)


# -- the grammar -------------------------------------------------------------------------------------------------------


def accepts(style: ToolFormat, text: str, name: str | None = None, parallel: bool = True) -> bool:
    spec = style.constraint(TOOLS, name, parallel)
    assert spec is not None
    assert spec.kind == "structural_tag"
    compiled = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([])).compile_structural_tag(spec.source)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


WHOLE = call("get_weather", ("city", "Oslo"), ("days", "3"), ("unit", "C"))


@pytest.mark.parametrize("text", [OSLO, WHOLE, call("now"), call("get_weather", ("city", "5"), ("unit", " F"))])
def test_the_constraint_takes_calls_that_are_then_read(style: ToolFormat, text: str) -> None:
    assert accepts(style, text)
    assert accepts(style, text, parallel=False)
    assert accepts(style, text, "now") == (text == call("now"))
    content, [(name, arguments)] = read_calls(style.parser(TOOLS), [text])
    assert content == ""
    values = json.loads(arguments)
    assert name == "now" or isinstance(values["city"], str)
    assert values.get("unit") in (None, "C", "F")


@pytest.mark.parametrize(
    "text",
    [
        *("", "Hello.", f"I look. {OSLO}", f"{OSLO} Done.", call("get_weather"), call("now", ("a", "1")), call("get")),
        *(call("get_weather", ("city", "Oslo"), ("days", "three")), call("get_weather", ("city", "x"), ("unit", "K"))),
        *(OSLO.replace("city", "town"), OSLO.removesuffix("</tool_call>")),
    ],
)
def test_the_constraint_refuses(style: ToolFormat, text: str) -> None:
    assert not accepts(style, text)


def test_several_calls_only_where_they_are_allowed(style: ToolFormat) -> None:
    assert accepts(style, OSLO + call("now"))
    assert not accepts(style, OSLO + call("now"), parallel=False)
    assert not accepts(style, call("now") * 2, "now")
    assert style.constraint(TOOLS, "nothing", True) is None


# -- reasoning ---------------------------------------------------------------------------------------------------------

IDS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "<|assistant|>": 4}


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        *(([4, 1], True), ([4, 1, 2], False), ([4, 2], False), ([9, 8], True), ([], True), ([3, 9, 4, 1], True)),
        *(([4, 1, 7, 7], True), ([4, 3, 7], False), ([1, 2, 3, 9], False), ([9, 4], False), ([1, 9, 4], False)),
        ([4, 7, 7], False),
    ],
)
def test_where_the_answer_begins(thinking: ReasoningFormat, prompt: list[int], inside: bool) -> None:
    assert thinking.starts_inside(prompt, IDS.get) is inside


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "rest"),
    [
        (True, "Sum: 3.</think>It is 3.", "Sum: 3.", "It is 3."),
        (True, f"I call.\n{OSLO}", "I call.\n", OSLO),
        (True, f"I call.</think>{OSLO}", "I call.", OSLO),
        (True, OSLO, "", OSLO),
        (False, "<think>Sum.</think>It.", "Sum.", "It."),
        (False, OSLO, "", OSLO),
        (False, "It is 3.</think>", "", "It is 3.</think>"),
    ],
)
def test_reasoning_and_rest(thinking: ReasoningFormat, inside: bool, text: str, reasoning: str, rest: str) -> None:
    for pieces in random_cuts(text, seed=2):
        assert read_reasoning(thinking.parser(inside), pieces) == (reasoning, rest)


# -- the trained model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model=str(MODEL), dtype="float32", device="cpu", max_model_len=512))


WEATHER = [tool("get_weather", city={"type": "string"})]


def answer(engine: Engine, question: str, **variables: Any) -> tuple[list[int], str]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], **variables)
    params = SamplingParams(temperature=0, max_tokens=64)
    (output,) = engine.generate([prompt], params)
    return prompt, output.outputs[0].text


def test_the_models_calls_are_read(engine: Engine, style: ToolFormat, thinking: ReasoningFormat) -> None:
    prompt, text = answer(engine, "What is the weather in Oslo?", tools=WEATHER)
    assert engine.tokenizer is not None
    inside = thinking.starts_inside(prompt, engine.tokenizer.find_token)
    reasoning, rest = read_reasoning(thinking.parser(inside), text)
    assert reasoning == ""
    assert read_calls(style.parser(WEATHER), rest) == ("", [("get_weather", '{"city": "Oslo"}')])


def test_the_models_reasoning_is_read(engine: Engine, thinking: ReasoningFormat) -> None:
    prompt, text = answer(engine, "What is 47 + 38?", enable_thinking=True)
    assert engine.tokenizer is not None
    inside = thinking.starts_inside(prompt, engine.tokenizer.find_token)
    reasoning, rest = read_reasoning(thinking.parser(inside), text)
    assert inside
    assert "77" in reasoning
    assert rest == "47 + 38 = 85."


def test_an_answer_without_reasoning_is_content(engine: Engine, thinking: ReasoningFormat) -> None:
    prompt, text = answer(engine, "What does a teacher do? <think>")
    assert engine.tokenizer is not None
    inside = thinking.starts_inside(prompt, engine.tokenizer.find_token)
    assert read_reasoning(thinking.parser(inside), text) == ("", text)
    assert text
