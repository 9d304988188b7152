"""GLM's tool calls: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`, one after another.

The format `glm45` of zai-org's chat templates since GLM-4.7, whose calls have no line breaks; white space between the
parts does no harm, so that the older form with line breaks is read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hookline.grammar import GrammarSpec
from hookline.parsers.constraint import allowed_functions, calls_grammar
from hookline.parsers.contract import ToolCallDelta
from hookline.parsers.scanning import Found, MarkedText, Markers
from hookline_glm5_2_mtp.tool_values import ToolValues

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_IN_CONTENT = Markers(_CALL)
_IN_NAME = Markers(_CALL, _CALL_END, _KEY)
_BETWEEN = Markers(_CALL, _CALL_END, _KEY, _VALUE)
_IN_KEY = Markers(_KEY_END, _CALL_END)
_IN_VALUE = Markers(_VALUE_END)


class Glm45ToolFormat:
    """See the module."""

    markers: Sequence[str] = (_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> Glm45ToolParser:
        """A parser of one answer; the tools' schemas say what is text."""
        return Glm45ToolParser(tools)

    def constraint(self, tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool) -> GrammarSpec | None:
        """Forces one call of the tool named, or calls of any, with arguments of the tool's schema."""
        tags = [
            {
                "begin": f"{_CALL}{function}",
                "content": {
                    "type": "json_schema",
                    "json_schema": schema,
                    "style": "glm_xml",
                    "max_whitespace_cnt": 1,  # more of it is a model that found no way on
                },
                "end": _CALL_END,
            }
            for function, schema in allowed_functions(tools, name)
        ]
        return calls_grammar(tags, "", several=parallel and name is None)


class Glm45ToolParser:
    """Takes one answer apart.

    A call is one from its first `<arg_key>` or its end on, and its name is given then; its arguments grow by complete
    pairs, and are closed at its end, at the next call's beginning, or at the answer's end behind a whole pair. One that
    ends within a pair leaves them open, so that nobody takes them for all. What is no call up to there is content as it
    stands.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._values = {function["name"]: ToolValues(function.get("parameters")) for function in functions}
        self._text = MarkedText()
        self._found = Found()
        self._state = self._read_content
        self._call_values = ToolValues(None)
        self._has_pairs = False
        # Text of the name, key or value that is being read.
        self._held: list[str] = []
        self._key = ""

    def push(self, text: str) -> tuple[str, Sequence[ToolCallDelta]]:
        """Takes more text; gives the content and the pieces of calls that are certain now."""
        self._text.push(text)
        while self._state():
            continue
        return self._found.take()

    def flush(self) -> tuple[str, Sequence[ToolCallDelta]]:
        """What was held back, at the end of the answer. A call that is cut within a pair stays cut short."""
        rest = self._text.rest()
        if self._state == self._read_content:
            self._found.show(rest)
        elif self._state == self._read_name:
            self._found.show(_CALL + self._take_held(rest))
        elif self._state == self._read_between and not self._key:
            self._end_call()
        elif not self._has_pairs:
            self._found.add_arguments("{")
        return self._found.end()

    def _take_held(self, last: str = "") -> str:
        held = "".join(self._held) + last
        self._held.clear()
        return held

    # -- states: each reads on, and says whether there may be more to read ---------------------------------------------

    def _read_content(self) -> bool:
        before, marker = self._text.read(_IN_CONTENT)
        self._found.show(before)
        if marker:
            self._state = self._read_name
        return bool(marker)

    def _read_name(self) -> bool:
        piece, marker = self._text.read(_IN_NAME)
        self._held.append(piece)
        if not marker:
            return False
        text = self._take_held()
        if marker == _CALL:
            self._found.show(_CALL + text)
        elif not text.strip():
            self._found.show(_CALL + text + marker)
            self._state = self._read_content
        else:
            self._begin_call(text.strip())
            self._follow(marker)
        return True

    def _read_between(self) -> bool:
        """Between the parts of a call; what stands there is white space, or belongs nowhere."""
        _, marker = self._text.read(_BETWEEN)
        if marker == _VALUE:
            self._state = self._read_value
        elif marker:
            self._follow(marker)
        return bool(marker)

    def _read_key(self) -> bool:
        piece, marker = self._text.read(_IN_KEY)
        self._held.append(piece)
        if marker:
            self._key = self._take_held().strip()
            self._state = self._read_between
        if marker == _CALL_END:
            self._follow(marker)
        return bool(marker)

    def _read_value(self) -> bool:
        piece, marker = self._text.read(_IN_VALUE)
        self._held.append(piece)
        if marker:
            self._add_pair(self._take_held())
            self._state = self._read_between
        return bool(marker)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _follow(self, marker: str) -> None:
        """Goes on behind a marker within a call: to its next pair, or out of it."""
        self._key = ""
        if marker == _KEY:
            self._state = self._read_key
            return
        self._end_call()
        self._state = self._read_name if marker == _CALL else self._read_content

    def _begin_call(self, name: str) -> None:
        self._has_pairs = False
        self._call_values = self._values.get(name) or ToolValues(None)
        self._found.begin_call(name)

    def _add_pair(self, text: str) -> None:
        if self._key:
            value = self._call_values.to_json(self._key, text)
            opening = ", " if self._has_pairs else "{"
            self._found.add_arguments(f"{opening}{json.dumps(self._key, ensure_ascii=False)}: {value}")
            self._has_pairs = True
        self._key = ""

    def _end_call(self) -> None:
        self._found.add_arguments("}" if self._has_pairs else "{}")
