"""The tools of a call: as clients send them, checked, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from hookline.parsers.contract import ToolFormat
from hookline.serving.api_errors import ApiError
from hookline.serving.limits import Limits
from hookline.serving.requests.bodies import Body
from hookline.serving.requests.constraints import check_schema
from hookline.serving.requests.validated import ToolUse

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_CHOICES = ("auto", "none", "required")


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments, of type object.")
    strict: bool | None = None


class Tool(Body):
    """A tool. There are functions alone."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class NamedTool(Body):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def tool_use(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool, tool_format: ToolFormat | None, limits: Limits
) -> ToolUse | None:
    """What a call may do with its tools; None where it can call none.

    Raises:
        ApiError: 400 if a tool is unsound, the choice has no tool, or the model's way to write calls is not known.
    """
    checked = checked_tools(tools, limits)
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    wanted = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools.", param="tool_choice")
    if isinstance(choice, NamedTool) and all(tool["function"]["name"] != wanted for tool in checked):
        raise ApiError(400, f"tool_choice names {wanted}, which is none of the tools.", param="tool_choice")
    if tool_format is None:
        raise ApiError(
            400,
            "This server does not know how the model writes tool calls. Start it with --tool-parser and the name of "
            'a parser, or give tool_choice "none".',
            param="tools",
            code="tools_not_supported",
        )
    return ToolUse(checked, wanted, parallel)


def checked_tools(tools: Sequence[Tool], limits: Limits) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's objects of sound tools.

    Raises:
        ApiError: 400 if there are too many, or one is unsound.
    """
    if len(tools) > limits.tools:
        raise ApiError(400, f"tools has {len(tools)} entries; at most {limits.tools} are allowed.", param="tools")
    names = [tool.function.name for tool in tools]
    for number, tool in enumerate(tools):
        _check_function(tool.function, f"tools[{number}].function", names[:number], limits)
    return tuple(_openai(tool) for tool in tools)


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a chat template reads of the tools: without what is said to the server alone."""
    return [
        {"type": "function", "function": {key: value for key, value in tool["function"].items() if key != "strict"}}
        for tool in tools
    ]


def _openai(tool: Tool) -> Mapping[str, Any]:
    function = tool.function
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _check_function(function: Function, place: str, taken: Sequence[str], limits: Limits) -> None:
    if function.name in _CHOICES or function.name in taken:
        why = "a choice of its own" if function.name in _CHOICES else "the name of another tool"
        raise ApiError(400, f"{place}.name is {function.name}, which is {why}.", param=f"{place}.name")
    if function.parameters is not None:
        param = f"{place}.parameters"
        check_schema(function.parameters, limits, param)
        if function.parameters.get("type", "object") != "object":
            raise ApiError(400, f"{param} must be a JSON schema of type object.", param=param)
