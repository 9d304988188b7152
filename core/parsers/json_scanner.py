"""Follows one JSON object that comes in pieces, and says where its keys and values begin and end (RFC 8259)."""

from __future__ import annotations

import re
from typing import Literal

# Why a scanner stopped: the piece's end, a key's or value's beginning or end, the object's end, or no JSON.
Stop = Literal["", "begin", "end", "object", "broken"]
# What may come next outside of strings. `first` of either: the closing bracket may come too.
_Place = Literal["object", "first key", "key", "colon", "first value", "value", "comma"]

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_TEXT = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


class JsonObjectScanner:
    """Checks one JSON object character by character.

    Its own keys and values are items, in turn: `scan` stops behind the first character of each and behind the last, and
    nowhere in what is nested in them.
    """

    __slots__ = ("_closings", "_digits", "_escaped", "_in_string", "_place", "_scalar")

    def __init__(self) -> None:
        self._closings: list[str] = []
        self._place: _Place = "object"
        self._in_string = False
        self._escaped = False
        self._digits = 0
        self._scalar: list[str] = []

    def scan(self, text: str, at: int) -> tuple[int, Stop]:
        """Goes on from `text[at]`; gives where it stopped and why. After `object` and `broken` it must not go on."""
        while at < len(text):
            if self._in_string:
                at, stop = self._scan_string(text, at)
            elif self._scalar:
                at, stop = self._scan_scalar(text, at)
            elif space := _SPACE.match(text, at):
                at, stop = space.end(), ""
            else:
                at, stop = self._scan_sign(text, at)
            if stop:
                return at, stop
        return at, ""

    def _scan_string(self, text: str, at: int) -> tuple[int, Stop]:
        char = text[at]
        if self._digits:
            self._digits -= 1
            return at + 1, "" if char in _HEX_DIGITS else "broken"
        if self._escaped:
            self._escaped = False
            self._digits = 4 if char == "u" else 0
            return at + 1, "" if char in '"\\/bfnrtu' else "broken"
        if char == "\\":
            self._escaped = True
            return at + 1, ""
        if char == '"':
            self._in_string = False
            return at + 1, self._item_end()
        plain = _PLAIN.match(text, at)
        return (at, "broken") if plain is None else (plain.end(), "")

    def _scan_scalar(self, text: str, at: int) -> tuple[int, Stop]:
        if more := _SCALAR_TEXT.match(text, at):
            self._scalar.append(more[0])
            return more.end(), ""
        scalar = "".join(self._scalar)
        self._scalar.clear()
        return at, self._item_end() if _SCALAR.fullmatch(scalar) else "broken"

    def _scan_sign(self, text: str, at: int) -> tuple[int, Stop]:
        """One character outside of strings, numbers and words."""
        char, place = text[at], self._place
        if place == "object":
            return (at + 1, self._open(char)) if char == "{" else (at, "broken")
        if char in "}]":
            return self._close(char, at)
        if place == "colon" or place == "comma":
            if char != (":" if place == "colon" else ","):
                return at, "broken"
            self._place = "value" if place == "colon" or self._closings[-1] == "]" else "key"
            return at + 1, ""
        if char != '"' and (place in ("key", "first key") or not (char in "{[" or _SCALAR_TEXT.match(char))):
            return at, "broken"
        return self._item(char, at)

    def _item(self, char: str, at: int) -> tuple[int, Stop]:
        """A key or a value begins. Within the object itself that is a stop."""
        is_key = self._place in ("key", "first key")
        self._place = "colon" if is_key else "comma"
        begins: Stop = "begin" if len(self._closings) == 1 else ""
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._open(char)
        else:
            self._scalar.append(char)
        return at + 1, begins

    def _open(self, char: str) -> Stop:
        self._closings.append(_CLOSING[char])
        self._place = "first key" if char == "{" else "first value"
        return ""

    def _close(self, char: str, at: int) -> tuple[int, Stop]:
        if char != self._closings[-1] or self._place not in ("comma", "first key", "first value"):
            return at, "broken"
        self._closings.pop()
        self._place = "comma"
        return at + 1, self._item_end() if self._closings else "object"

    def _item_end(self) -> Stop:
        return "end" if len(self._closings) == 1 else ""
