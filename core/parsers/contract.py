"""What a tool parser and a reasoning parser are. A plugin brings its own through the hooks; nothing here imports torch.

A *format* is found by name and knows how a kind of model writes. It makes one *parser* for each answer, which takes the
answer's text in whatever pieces it comes and gives each piece on in linear time, holding back only what may still
become a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hookline.grammar import GrammarSpec


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call.

    Attributes:
        index: which call of the answer, from 0.
        name: of the function, with the first piece of a call; None with the others.
        arguments: more of the arguments' JSON text; the pieces of a call joined are one JSON object, or where the
            answer was cut short perhaps only the beginning of one.
    """

    index: int
    name: str | None = None
    arguments: str = ""


class ToolParser(Protocol):
    """Takes one answer's text apart into content and tool calls."""

    def push(self, text: str) -> tuple[str, Sequence[ToolCallDelta]]:
        """Takes more text; gives the content and the pieces of calls that are certain now."""

    def flush(self) -> tuple[str, Sequence[ToolCallDelta]]:
        """What was held back, at the end of the answer; a call that is not complete is closed or given as content."""


class ReasoningParser(Protocol):
    """Takes one answer's text apart into reasoning and what follows it."""

    def push(self, text: str) -> tuple[str, str]:
        """Takes more text; gives the reasoning and the rest that are certain now."""

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""


@runtime_checkable
class ToolFormat(Protocol):
    """How a kind of model writes tool calls.

    Attributes:
        markers: texts that open or close a call. Where the tokenizer marks them as special they must not be left out of
            the text, so that a request with tools is detokenised with them.
    """

    markers: Sequence[str]

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        """A parser of one answer to a request with these tools (OpenAI's `tools`, checked)."""

    def constraint(self, tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool) -> GrammarSpec | None:
        """What forces the answer to be at least one call: of any tool, or of the one named; None if nothing can.

        Args:
            parallel: whether several calls are allowed.
        """


@runtime_checkable
class ReasoningFormat(Protocol):
    """How a kind of model writes its reasoning.

    Attributes:
        markers: as of `ToolFormat`.
        end: the text of the token that ends reasoning, behind which a grammar begins to hold.
    """

    markers: Sequence[str]
    end: str

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: Callable[[str], int | None]) -> bool:
        """Whether the answer to this prompt begins inside reasoning.

        Args:
            find_token: the id of the token that is spelled so.
        """

    def parser(self, starts_inside: bool) -> ReasoningParser:
        """A parser of one answer."""
