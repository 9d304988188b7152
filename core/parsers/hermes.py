"""Tool calls as JSON between tags: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.

The format of the Hermes models, which many others learned. A tag may also hold several calls, or a list of them, and
`parameters` stands for `arguments` too, because models write both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hookline.grammar import GrammarSpec
from hookline.parsers.constraint import allowed_functions, calls_grammar
from hookline.parsers.contract import ToolCallDelta
from hookline.parsers.json_scanner import JsonObjectScanner, Stop
from hookline.parsers.scanning import Found, MarkedText, Markers

_BEGIN, _END = "<tool_call>", "</tool_call>"
_BEGINNING, _IN_TAG = Markers(_BEGIN), Markers(_BEGIN, _END)
_BETWEEN_CALLS = re.compile(r"[\s\[\],]+")
_ARGUMENTS = ("arguments", "parameters")


class HermesFormat:
    """See the module."""

    markers: Sequence[str] = (_BEGIN, _END)

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> HermesParser:
        """A parser of one answer; it needs no schemas, since the calls are JSON already."""
        return HermesParser()

    def constraint(self, tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool) -> GrammarSpec | None:
        """Forces one call of the tool named, or calls of any, with arguments of the tool's schema."""
        tags = [
            {
                "begin": f'{_BEGIN}\n{{"name": {json.dumps(function)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema},
                "end": f"}}\n{_END}",
            }
            for function, schema in allowed_functions(tools, name)
        ]
        return calls_grammar(tags, "\n", several=parallel and name is None)


class HermesParser:
    """Takes one answer apart.

    A call's name is given as soon as its arguments begin, and these as they come. What is no sound call up to there is
    content as it stands. Where a call breaks later its arguments end there, and what follows is content.
    """

    def __init__(self) -> None:
        self._text = MarkedText()
        self._found = Found()
        self._state = self._read_content
        self._call = _Call()
        # Whether the name of `_call` was given, so that it is a call whatever comes.
        self._is_given = False
        self._called_in_tag = False
        # Text within a tag since its beginning or its last call: content, if no call comes of it.
        self._held: list[str] = []

    def push(self, text: str) -> tuple[str, Sequence[ToolCallDelta]]:
        """Takes more text; gives the content and the pieces of calls that are certain now."""
        self._text.push(text)
        while self._state():
            continue
        return self._found.take()

    def flush(self) -> tuple[str, Sequence[ToolCallDelta]]:
        """What was held back, at the end of the answer. A call whose arguments have begun stays cut short."""
        rest = self._text.rest()
        if self._state != self._read_tag or not self._called_in_tag:
            self._found.show("".join(self._held) + rest)
        return self._found.end()

    def _show_held(self, more: str = "") -> None:
        """What is held, and `more`, was no call."""
        self._found.show("".join(self._held) + more)
        self._held.clear()

    def _give(self, name: str, arguments: str) -> None:
        """More of a call's arguments, and its name before the first of them."""
        if self._is_given:
            self._found.add_arguments(arguments)
            return
        self._held.clear()
        self._found.begin_call(name, arguments)
        self._is_given = self._called_in_tag = True

    # -- states: each reads on, and says whether there may be more to read ---------------------------------------------

    def _read_content(self) -> bool:
        before, marker = self._text.read(_BEGINNING)
        self._found.show(before)
        if marker:
            self._begin_tag()
        return bool(marker)

    def _begin_tag(self) -> None:
        self._held.append(_BEGIN)
        self._called_in_tag = False
        self._state = self._read_tag

    def _read_tag(self) -> bool:
        """Within a tag, outside of calls."""
        text = self._text
        if between := _BETWEEN_CALLS.match(text.text, text.at):
            self._held.append(between[0])
            text.at = between.end()
        if text.text.startswith("{", text.at):
            self._call = _Call()
            self._is_given = False
            self._state = self._read_call
            return True
        other, marker = text.read(_IN_TAG)
        if not other and not marker:
            return False
        if other or not self._called_in_tag:
            self._show_held(other + (marker if marker == _END else ""))
        self._held.clear()
        self._state = self._read_content
        if marker == _BEGIN:
            self._begin_tag()
        return True

    def _read_call(self) -> bool:
        text, call, start = self._text, self._call, self._text.at
        text.at, stop = call.scanner.scan(text.text, start)
        if not self._is_given:
            self._held.append(text.text[start : text.at])
        try:
            arguments = call.read(text.text, start, text.at, stop)
        except (ValueError, RecursionError):
            arguments, stop = "", "broken"
        if arguments:
            self._give(call.name, arguments)
        if stop == "object":
            self._state = self._read_tag
        elif stop == "broken":
            self._show_held()
            self._state = self._read_content
        return bool(stop)


class _Call:
    """One call's object as it comes.

    Attributes:
        scanner: of its JSON.
        name: of the function; "" until it is known.
    """

    def __init__(self) -> None:
        self.scanner = JsonObjectScanner()
        self.name = ""
        self._key: str | None = None
        self._in_item = False
        self._item: list[str] = []
        # Arguments are given as they come, or came before the name, or were given: the first ones count.
        self._streams = False
        self._early = ""
        self._done = False

    def read(self, text: str, start: int, end: int, stop: Stop) -> str:
        """Takes what the scanner read and why it stopped; gives the arguments' text that is certain now.

        Raises:
            ValueError, RecursionError: if this is no call. Never after it gave arguments.
        """
        if stop == "begin":
            start = end - 1
            self._in_item = True
            expected = self._key in _ARGUMENTS and not self._done
            self._streams = expected and self.name != "" and text[start] == "{"
            self._done |= self._streams
        piece = text[start:end] if self._in_item else ""
        self._in_item &= stop != "end"
        if not self._streams:
            self._item.append(piece)
            return self._end_item() if stop == "end" else self._end() if stop == "object" else ""
        if stop == "end":
            self._streams, self._key = False, None
        return piece

    def _end_item(self) -> str:
        item = "".join(self._item)
        self._item.clear()
        if self._key is None:
            self._key = json.loads(item)
            return ""
        key, self._key = self._key, None
        if self._done:
            return ""
        if key == "name" and not self.name:
            self.name = _name(item)
        elif key in _ARGUMENTS and not self._early:
            self._early = _arguments(item)
        self._done = self.name != "" and self._early != ""
        return self._early if self._done else ""

    def _end(self) -> str:
        if not self.name:
            raise ValueError("a call without a name")
        if self._done:
            return ""
        self._done = True
        return "{}"


def _name(item: str) -> str:
    name = json.loads(item)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call's name is no text")
    name.encode()  # half a surrogate pair could not be sent on
    return name.strip()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _arguments(item: str) -> str:
    """The arguments' object, which may stand in a string; `null` and an empty string are arguments of none."""
    if item.startswith("{"):
        return item
    inner = json.loads(item)
    text = "{}" if inner is None else inner.strip() or "{}" if isinstance(inner, str) else ""
    text.encode()
    if not isinstance(json.loads(text, parse_constant=_refuse), dict):
        raise ValueError("a call's arguments are no object")
    return text
