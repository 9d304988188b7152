"""LangChain on OpenAI's client: answers, streams, tools and answers of a given shape."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.clients.server import KEY, Server

CAPITAL = "What is the capital of France?"


def chat_model(server: Server, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr(KEY),
        model=server.model(),
        temperature=0,
        max_retries=0,
        timeout=60,
        **{"max_completion_tokens": 96, **fields},
    )


def test_invoke_answers(smollm2_server: Server) -> None:
    answer = chat_model(smollm2_server, max_completion_tokens=24).invoke(CAPITAL)
    assert "Paris" in answer.text
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )


def test_stream_is_the_answer_in_pieces_with_its_usage(smollm2_server: Server) -> None:
    model = chat_model(smollm2_server, max_completion_tokens=24, stream_usage=True)
    whole, chunks = model.invoke(CAPITAL), list(model.stream(CAPITAL))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert len([chunk for chunk in chunks if chunk.text]) > 2
    assert joined.text == whole.text
    assert joined.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_a_batch_is_answered_in_order(smollm2_server: Server) -> None:
    model = chat_model(smollm2_server, max_completion_tokens=24)
    questions: list[Any] = [CAPITAL, "What is the capital of Italy?", "Name a colour."]
    answers = [answer.text for answer in model.batch(questions)]
    assert answers == [model.invoke(question).text for question in questions]
    assert len(set(answers)) == 3


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Norway", "Italy"]
    capital: Literal["Paris", "Oslo", "Rome"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_becomes_an_object(smollm2_server: Server, method: Any) -> None:
    model = chat_model(smollm2_server).with_structured_output(Capital, method=method)
    assert model.invoke(f"{CAPITAL} Answer in JSON.") == Capital(country="France", capital="Paris")


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return '{"weather": "rainy", "temperature": 7}' if city == "Oslo" else "{}"


def test_a_bound_tool_is_called(glm_server: Server) -> None:
    model = chat_model(glm_server).bind_tools([get_weather])
    question = ("human", "What is the weather in Oslo?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert "Oslo" in model.invoke([question, answer, result]).text


def test_a_streamed_call_is_joined(glm_server: Server) -> None:
    model = chat_model(glm_server).bind_tools([get_weather])
    first, *others = model.stream("What is the weather in Oslo?")
    assert isinstance(first, AIMessageChunk)
    joined = first.__add__(others)
    assert isinstance(joined, AIMessageChunk)
    (call,) = joined.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
