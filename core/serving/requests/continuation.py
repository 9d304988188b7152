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

    def content_of(more: str) -> str:
        parser = style.parser(tools)
        parser.push(text)
        return parser.push(more + _ANSWER)[0] + parser.flush()[0]

    content = content_of("")
    # What a call has begun with may be content in the end, but comes with its marker then.
    if not content.endswith(_ANSWER) or any(marker in content for marker in style.markers):
        return True
    # A marker that is no content behind the text ends something that began in it.
    return any(not content_of(marker).endswith(marker + _ANSWER) for marker in style.markers)
