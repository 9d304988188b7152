"""Reads text that comes in pieces up to markers, in time linear in its length whatever the pieces are."""

from __future__ import annotations

import re

from hookline.parsers.contract import ToolCallDelta


class Markers:
    """Texts to look for together.

    Args:
        texts: none of them empty or the beginning of another.

    Raises:
        ValueError: if one is.
    """

    __slots__ = ("longest", "pattern", "prefixes")

    def __init__(self, *texts: str) -> None:
        if any(text != other and other.startswith(text) for text in texts for other in texts) or not all(texts):
            raise ValueError(f"no marker may be empty or the beginning of another, but these are: {texts}")
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self.longest = max(map(len, texts))
        self.prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))


class MarkedText:
    """Text between markers. What may still become one is held back, and not one character more."""

    __slots__ = ("at", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0

    def push(self, text: str) -> None:
        """Takes more text."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def read(self, markers: Markers) -> tuple[str, str]:
        """The text before the next marker, and that marker; or all text that cannot belong to one any more, and ""."""
        text, start = self.text, self.at
        if not start and text in markers.prefixes:
            return "", ""
        found = markers.pattern.search(text, start)
        if found is not None:
            self.at = found.end()
            return text[start : found.start()], found[0]
        self.at = len(text)
        for at in range(max(start, len(text) - markers.longest + 1), len(text)):
            if text[at:] in markers.prefixes:
                self.at = at
                break
        return text[start : self.at], ""

    def rest(self) -> str:
        """All text that is left, as it is."""
        rest = self.text[self.at :]
        self.text, self.at = "", 0
        return rest


class Content:
    """An answer's text beside its calls: white space that merely sets calls apart is none of it."""

    __slots__ = ("_calls", "_shown", "_space")

    def __init__(self) -> None:
        self._space: list[str] = []
        self._shown = False
        self._calls = False

    def push(self, text: str) -> str:
        """Takes more text; gives what of it to show now."""
        if self._shown or not text:
            return text
        self._space.append(text)
        if text.isspace():
            return ""
        self._shown = True
        text = "".join(self._space)
        self._space.clear()
        return text

    def call(self) -> None:
        """Notes that a call stands here."""
        self._space.clear()
        self._shown, self._calls = False, True

    def flush(self) -> str:
        """The white space of an answer that has nothing else."""
        return "" if self._calls else "".join(self._space)


class Found:
    """What a parser of tool calls has read of an answer and not given on yet."""

    __slots__ = ("_beside", "_content", "_deltas", "_index")

    def __init__(self) -> None:
        self._beside = Content()
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._index = -1

    def show(self, text: str) -> None:
        """Takes text beside the calls."""
        self._content.append(self._beside.push(text))

    def begin_call(self, name: str, arguments: str = "") -> None:
        """Takes the beginning of the next call."""
        self._index += 1
        self._beside.call()
        self._deltas.append(ToolCallDelta(self._index, name, arguments))

    def add_arguments(self, text: str) -> None:
        """Takes more of the call that began last."""
        self._deltas.append(ToolCallDelta(self._index, None, text))

    def take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Content and pieces of calls since the last time, as a parser's `push` gives them."""
        content, deltas = "".join(self._content), tuple(self._deltas)
        self._content.clear()
        self._deltas.clear()
        return content, deltas

    def end(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """`take` at the answer's end."""
        self._content.append(self._beside.flush())
        return self.take()
