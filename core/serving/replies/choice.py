"""One continuation as a client sees it: its text taken apart into content, reasoning and tool calls, and counted."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hookline.parsers.contract import ReasoningFormat, ReasoningParser, ToolCallDelta, ToolFormat, ToolParser
from hookline.scheduling.output import OutputDelta
from hookline.serving.replies.token_texts import TokenTexts
from hookline.serving.requests.validated import ValidatedCall


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What answers are made with, the same for all calls of a model.

    Attributes:
        tool_format, reasoning_format: how the model writes; None where it does neither, or the operator wants none.
    """

    texts: TokenTexts
    eos_token_ids: frozenset[int]
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None


@dataclass(slots=True)
class Piece:
    """What a delta adds to a continuation.

    Attributes:
        tool_calls: OpenAI's objects, one a call: `id` and the name with a call's first, and more of its arguments.
    """

    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]


class Choice:
    """One continuation of a call's prompt.

    Args:
        index: of the choice in the answer.
        call: what the client wants.

    Attributes:
        tokens, reasoning_tokens: so far; exact where one token ends the reasoning, else to a token or two.
        finish_reason: as OpenAI spells it, with the last delta; None before.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end.
    """

    def __init__(self, index: int, call: ValidatedCall, context: AnswerContext) -> None:
        self.index = index
        self.tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._call = call
        self._eos = context.eos_token_ids
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        self._called = False
        if call.kind == "chat" and context.reasoning_format is not None and call.reasoning != "content":
            self._reasoning = context.reasoning_format.parser(call.starts_in_reasoning)
            self._counter = _ReasoningCounter(call.starts_in_reasoning, context.reasoning_format.end, context)
        if call.tools is not None and context.tool_format is not None:
            self._tools = context.tool_format.parser(call.tools.tools)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._counter.count

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning stands in fields of its own."""
        return self._reasoning is not None and self._call.reasoning == "separate"

    def take(self, delta: OutputDelta) -> Piece:
        """More of it; with the last delta everything that was held back comes too."""
        if self._call.prompt_only:
            if delta.finish_reason is not None:
                self.finish_reason = "length"
            return Piece("", "", [])
        self.tokens += len(delta.token_ids)
        text, ends = delta.text, delta.finish_reason is not None
        if ends and self._call.include_stop and isinstance(delta.stop_reason, str):
            text += delta.stop_reason
        reasoning, calls = "", list[ToolCallDelta]()
        if self._reasoning is not None:
            reasoning, text = self._read_reasoning(text, delta.token_ids, ends)
        if self._tools is not None:
            text, calls = self._read_tools(text, ends)
        if ends:
            self._end(delta)
        return Piece(text, reasoning, self._shown(calls) if calls else [])

    def _read_reasoning(self, text: str, token_ids: Sequence[int], ends: bool) -> tuple[str, str]:
        parser = self._reasoning
        if parser is None:
            return "", text
        reasoning, rest = parser.push(text) if text else ("", "")
        if ends:
            more, after = parser.flush()
            reasoning, rest = reasoning + more, rest + after
        self._counter.take(token_ids, reasoning, rest)
        return (reasoning if self.separates_reasoning else ""), rest

    def _read_tools(self, text: str, ends: bool) -> tuple[str, list[ToolCallDelta]]:
        parser = self._tools
        if parser is None:
            return text, []
        content, calls = "", list[ToolCallDelta]()
        if text:
            content, pushed = parser.push(text)
            calls += pushed
        if ends:
            more, flushed = parser.flush()
            content += more
            calls += flushed
        tools = self._call.tools
        if tools is not None and not tools.parallel:
            calls = [call for call in calls if call.index == 0]
        self._called = self._called or bool(calls)
        return content, calls

    def _shown(self, calls: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
        shown: dict[int, dict[str, Any]] = {}
        for call in calls:
            entry = shown.get(call.index)
            if entry is None:
                entry = shown[call.index] = {"index": call.index, "function": {"arguments": ""}}
            if call.name is not None:
                entry |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                entry["function"] = {"name": call.name, "arguments": ""}
            entry["function"]["arguments"] += call.arguments
        return list(shown.values())

    def _end(self, delta: OutputDelta) -> None:
        self.finish_reason = delta.finish_reason
        self.stop_reason = None if delta.stop_reason in self._eos else delta.stop_reason
        tools = self._call.tools
        # OpenAI's API: a call that a client named itself ends with `stop`.
        named = tools is not None and tools.choice not in ("auto", "required")
        if self._called and delta.finish_reason == "stop" and not named:
            self.finish_reason = "tool_calls"


class _ReasoningCounter:
    """How many tokens were reasoning, its end marker included.

    Args:
        inside: whether the answer begins inside reasoning.
        end: the text that ends it, mostly of one token.
    """

    def __init__(self, inside: bool, end: str, context: AnswerContext) -> None:
        self.count = 0
        self._inside = inside
        self._end = context.texts.find(end)
        self._context = context
        self._unsure = list[int]()  # tokens whose text is held back, or only part of a character

    def take(self, token_ids: Sequence[int], reasoning: str, rest: str) -> None:
        """Tokens, and the text that came with them."""
        self._unsure += token_ids
        self._inside = self._inside or bool(reasoning)
        if not (reasoning or rest):
            return
        if not rest:
            self.count += len(self._unsure)
        elif self._inside:
            self._inside = False
            if self._end in self._unsure:
                self.count += self._unsure.index(self._end) + 1
            else:
                self.count += self._tokens_before(len(rest))
        self._unsure.clear()

    def _tokens_before(self, chars: int) -> int:
        """How many of the tokens come before those of the last characters."""
        place = len(self._unsure)
        while place and chars > 0:
            place -= 1
            token_id = self._unsure[place]
            chars -= 0 if token_id in self._context.eos_token_ids else self._context.texts[token_id].chars
        return place
