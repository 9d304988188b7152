"""An answer that goes on with the last message: where that breaks off, as the parsers of the answer must know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.parsers.contract import ReasoningFormat, ToolFormat

# Stands for the answer: a character of Unicode's private area, which no marker holds.
_ANSWER = "\ue000"


def ends_in_reasoning(text: str, style: ReasoningFormat) -> tuple[bool, str]:
    """Whether an answer behind `text` begins inside reasoning; and what of the text is none."""
    parser = style.parser(False)
    _, rest = parser.push(text)
    reasoning, more = parser.push(_ANSWER)
    return reasoning.endswith(_ANSWER), (rest + more).removesuffix(_ANSWER)


def ends_in_call(text: str, style: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `text` breaks off within a tool call, so that what follows it is no content."""
    parser = style.parser(tools)
    parser.push(text)
    content, _ = parser.push(_ANSWER)
    # What a call has begun with may be content in the end, but comes with its marker then.
    return not content.endswith(_ANSWER) or any(marker in content for marker in style.markers)
