"""OpenAI's own client, asking for more than text: tool calls, reasoning, and answers of a given shape."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.clients.server import Server

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
# Random weights never end a text: what they fill in has to be of a known length.
BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Paris", "Rome"]},
        "days": {"enum": [1, 2, 3]},
        "wind": {"type": "boolean"},
    },
    "required": ["city", "days", "wind"],
    "additionalProperties": False,
}
# Short for the models that write it letter by letter.
SHORT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OSLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 47 + 38?"}]
THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


def tool(name: str, parameters: dict[str, Any]) -> Any:
    function = {"name": name, "description": "Get the current weather of a city.", "parameters": parameters}
    return {"type": "function", "function": function}


def ask(server: Server, messages: list[Any], **fields: Any) -> Any:
    """An answer; of random weights one that does not dwell in the white space that JSON allows anywhere."""
    if server.model() == "tiny":
        fields["logit_bias"] = {str(server.tokenize(char)[0]): -100 for char in " \t\r\n"}
    asked = {"model": server.model(), "temperature": 0, "max_tokens": 96, "messages": messages, **fields}
    return server.client().chat.completions.create(**asked)


def joined_calls(chunks: list[Any]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of every call of a stream, from its pieces."""
    calls: dict[int, list[str]] = {}
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        for piece in delta.tool_calls or []:
            if piece.index not in calls:
                assert piece.type == "function"
                calls[piece.index] = [piece.id, piece.function.name, ""]
            else:
                assert piece.id is None
            calls[piece.index][2] += piece.function.arguments or ""
    return [(id_, name, arguments) for id_, name, arguments in calls.values()]


def test_the_model_calls_a_tool_and_reads_its_answer(glm_server: Server) -> None:
    tools = [tool("get_weather", WEATHER)]
    answer = ask(glm_server, OSLO, tools=tools)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert choice.message.content is None
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "rainy", "temperature": 7}'}
    told = ask(glm_server, [*OSLO, choice.message.model_dump(exclude_none=True), result], tools=tools).choices[0]
    assert told.finish_reason == "stop"
    assert "rain" in told.message.content
    assert "Oslo" in told.message.content


def test_a_streamed_call_is_the_whole_one(glm_server: Server) -> None:
    chunks = list(ask(glm_server, OSLO, tools=[tool("get_weather", WEATHER)], stream=True))
    ((call_id, name, arguments),) = joined_calls(chunks)
    assert call_id.startswith("call_")
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == ""


def test_with_choice_none_no_tool_is_called(glm_server: Server) -> None:
    choice = ask(glm_server, OSLO, tools=[tool("get_weather", WEATHER)], tool_choice="none", max_tokens=24).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content


# All ways with the model that is fast; with the others, which write calls otherwise, each form of answer.
FORCED = [("tiny_server", choice, stream) for choice in ("required", "wind") for stream in (False, True)]
FORCED += [("glm_server", "required", True), ("smollm2_server", "required", False), ("smollm2_server", "wind", True)]


@pytest.mark.parametrize(("served", "choice", "stream"), FORCED)
def test_a_call_can_be_forced(served: str, choice: str, stream: bool, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(served)
    named: Any = "required" if choice == "required" else {"type": "function", "function": {"name": choice}}
    answer = ask(
        server,
        [{"role": "user", "content": "Tell me a story."}],
        tools=[tool("rain", SHORT), tool("wind", SHORT)],
        tool_choice=named,
        parallel_tool_calls=False,
        max_tokens=200,
        stream=stream,
    )
    if stream:
        chunks = list(answer)
        calls, reason = joined_calls(chunks), chunks[-1].choices[0].finish_reason
    else:
        found = answer.choices[0].message.tool_calls or []
        calls = [(call.id, call.function.name, call.function.arguments) for call in found]
        reason = answer.choices[0].finish_reason
    ((_, name, arguments),) = calls
    assert name in (["rain", "wind"] if choice == "required" else [choice])
    jsonschema.validate(json.loads(arguments), SHORT)
    assert reason == ("tool_calls" if choice == "required" else "stop")


class Capital(BaseModel):
    """What a client wants to know."""

    country: Literal["France", "Norway", "Italy"]
    capital: Literal["Paris", "Oslo", "Rome"]
    population_over_a_million: bool


def test_an_answer_is_parsed_into_a_class(smollm2_server: Server) -> None:
    answer = smollm2_server.client().chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        response_format=Capital,
        temperature=0,
        max_tokens=200,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Capital)
    assert (choice.message.parsed.country, choice.message.parsed.capital) == ("France", "Paris")


def test_a_tools_arguments_are_parsed_into_a_class(tiny_server: Server) -> None:
    answer = tiny_server.client().chat.completions.parse(
        model="tiny",
        messages=OSLO,
        tools=[openai.pydantic_function_tool(Capital)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=300,
        logit_bias={str(tiny_server.tokenize(char)[0]): -100 for char in " \t\r\n"},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Capital)


@pytest.mark.parametrize(
    ("served", "stream"), [("tiny_server", False), ("tiny_server", True), ("smollm2_server", True)]
)
def test_an_answer_has_the_schema_asked_for(served: str, stream: bool, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(served)
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": BOUNDED, "strict": True}}
    answer = ask(server, OSLO, response_format=wanted, max_tokens=200, temperature=1, seed=1, n=2, stream=stream)
    texts, reasons = ["", ""], ["", ""]
    if stream:
        for (choice,) in (chunk.choices for chunk in answer):
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
        reasons = [choice.finish_reason for choice in answer.choices]
    assert reasons == ["stop", "stop"]
    for text in texts:
        jsonschema.validate(json.loads(text), BOUNDED)


def test_an_answer_is_any_json_object(smollm2_server: Server) -> None:
    answer = ask(
        smollm2_server,
        [{"role": "user", "content": "Give the capital of France as a JSON object with the one key capital."}],
        response_format={"type": "json_object"},
        max_tokens=200,
    ).choices[0]
    assert isinstance(json.loads(answer.message.content), dict)
    assert answer.finish_reason == "stop"


def test_an_answer_is_one_of_the_choices(smollm2_server: Server) -> None:
    def complete(**outputs: object) -> str:
        answer = smollm2_server.client().completions.create(
            model="smollm2",
            prompt="The capital of France is",
            temperature=0,
            extra_body={"structured_outputs": outputs},
        )
        return answer.choices[0].text

    assert complete(choice=[" London", " Paris", " Rome"]) == " Paris"
    assert complete(choice=[" London", " Oslo"]) in (" London", " Oslo")
    assert re.fullmatch("[0-9]{4}", complete(regex="[0-9]{4}"))
    assert complete(grammar='root ::= " known as " ("Paris" | "Rome")') == " known as Paris"


@pytest.mark.parametrize(
    ("schema", "word"),
    [({"type": "nothing"}, "nothing"), ({"$ref": "#"}, ""), ({"type": "array", "minItems": 3, "maxItems": 2}, "")],
)
def test_a_schema_that_cannot_be_is_refused(tiny_server: Server, schema: dict[str, Any], word: str) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tiny_server, OSLO, response_format=wanted)
    assert (caught.value.param or "").startswith("response_format")
    assert word in caught.value.message


@pytest.fixture(scope="module")
def thoughtful(glm_server: Server) -> Any:
    """The whole answer to a sum, with its reasoning."""
    return ask(glm_server, SUM, extra_body=THINK)


def test_reasoning_has_fields_of_its_own(glm_server: Server, thoughtful: Any) -> None:
    answer = thoughtful
    (choice,) = answer.choices
    thought = choice.message.model_extra["reasoning"]
    assert thought == choice.message.model_extra["reasoning_content"]
    assert "47 + 30" in thought
    assert "85" in choice.message.content
    assert "think>" not in thought + choice.message.content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    said = {"role": "assistant", "content": choice.message.content, "reasoning": thought}
    more: Any = {"role": "user", "content": "What is 20 + 30?"}

    def prompt_tokens(said: Any) -> int:
        return int(ask(glm_server, [*SUM, said, more], max_tokens=1).usage.prompt_tokens)

    longer = prompt_tokens(said)
    assert longer > prompt_tokens(said | {"reasoning": None})
    assert longer == prompt_tokens(said | {"reasoning_content": thought})


def test_streamed_reasoning_is_the_whole_one(glm_server: Server, thoughtful: Any) -> None:
    message = thoughtful.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in ask(glm_server, SUM, extra_body=THINK, stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join((delta.model_extra or {}).get(name) or "" for delta in deltas) == message.model_extra[name]
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_reasoning_can_be_left_out_or_in(glm_server: Server, thoughtful: Any) -> None:
    message = thoughtful.choices[0].message
    without = ask(glm_server, SUM, extra_body=THINK | {"include_reasoning": False}).choices[0].message
    assert without.content == message.content
    assert not (without.model_extra or {}).get("reasoning")
    within = ask(glm_server, SUM, extra_body=THINK | {"separate_reasoning": False}).choices[0].message
    assert message.model_extra["reasoning"] in within.content
    assert message.content in within.content
