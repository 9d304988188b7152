"""The messages of a conversation: as clients send them, and as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from hookline.serving.api_errors import ApiError
from hookline.serving.requests.bodies import Body

Name = Annotated[str, Field(max_length=256)]


class TextPart(Body):
    """A part of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an earlier answer called."""

    name: Name
    arguments: str = Field("", description="A JSON object, as text.")


class CalledTool(Body):
    """A tool call of an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message. What SDKs send back of our own answers and templates do not read is left aside."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="`developer` is read as `system`."
    )
    content: str | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = Field(
        None, description="Parts are joined by line breaks. Null is for assistants' messages with tool calls."
    )
    name: Name | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=1024, fail_fast=True)] | None = Field(
        None, description="Of an assistant's message."
    )
    tool_call_id: Name | None = Field(None, description="Of a tool's message: the call that it answers.")
    reasoning: str | None = Field(None, description="Of an assistant's message; the same as `reasoning_content`.")
    reasoning_content: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What a chat template reads: content as text, arguments as objects, and reasoning under both of its names.

    Raises:
        ApiError: 400, naming the message's field that does not go with its role.
    """
    return [_template_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def text_of(message: Message) -> str:
    """The content of a message as one text; "" where it has none."""
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _template_message(message: Message, place: str) -> dict[str, Any]:
    by_assistant = message.role == "assistant"
    calls = message.tool_calls or []
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if calls and not by_assistant:
        raise _misplaced(f"{place}.tool_calls", "only an assistant's message has tool calls")
    if reasoning is not None and not by_assistant:
        name = "reasoning_content" if message.reasoning is None else "reasoning"
        raise _misplaced(f"{place}.{name}", "only an assistant's message has reasoning")
    if message.tool_call_id is not None and message.role != "tool":
        raise _misplaced(f"{place}.tool_call_id", "only a tool's message answers a call")
    if message.content is None and not (calls or reasoning):
        raise _misplaced(f"{place}.content", "give text; only an assistant's message with tool calls may have null")
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        # Never null: templates test for a text that is empty, or just print it.
        "content": text_of(message),
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if reasoning is not None:
        shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        shown["tool_calls"] = [_template_call(call) for call in calls]
    return shown


def _template_call(call: CalledTool) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _arguments(text: str) -> dict[str, Any] | str:
    """The object that the text holds, for templates walk through it; the text itself where it holds none."""
    if not text.strip():
        return {}
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return found if isinstance(found, dict) else text


def _misplaced(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param} does not go with the message's role: {what}.", param=param, code="invalid_value")
