"""Reasoning between two markers at the start of an answer: `<think>...</think>`, as many models write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hookline.parsers.scanning import MarkedText, Markers

# Line breaks as vocabularies spell them: byte-level ones, and those with tokens for single bytes.
_BREAKS = ("\u010a", "\u010a\u010a", "\n", "\n\n", "<0x0A>")


class ThinkFormat:
    """Reasoning at the start of an answer, from `begin` to `end`; either the answer or its prompt has `begin`.

    A later `begin` is text like any other, so that an answer can speak of the marker.

    Args:
        begin, end: the markers, which belong to neither part.
        also_end: markers that end reasoning as well, but belong to what follows it.
    """

    def __init__(self, begin: str = "<think>", end: str = "</think>", also_end: Sequence[str] = ()) -> None:
        self.begin = begin
        self.end = end
        self.also_end = tuple(also_end)
        self.markers: Sequence[str] = (begin, end)

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: Callable[[str], int | None]) -> bool:
        """Whether the prompt ends with `begin` and line breaks.

        One that stands earlier says nothing: it may be a user's, for markers are often no control tokens.
        """
        begin, breaks = find_token(self.begin), {find_token(text) for text in _BREAKS} - {None}
        last = next((token_id for token_id in reversed(prompt_token_ids) if token_id not in breaks), None)
        return begin is not None and last == begin

    def parser(self, starts_inside: bool) -> ThinkParser:
        """A parser of one answer."""
        return ThinkParser(self, starts_inside)


def last_marker(
    prompt_token_ids: Sequence[int], markers: Sequence[str], find_token: Callable[[str], int | None]
) -> str | None:
    """Which of the markers stands last in a prompt, each being one token; None without any."""
    texts = {find_token(marker): marker for marker in markers}
    return next((texts[token_id] for token_id in reversed(prompt_token_ids) if token_id in texts), None)


class ThinkParser:
    """Takes one answer apart; see `ThinkFormat`. Every character of it but the two markers is given, in order."""

    def __init__(self, style: ThinkFormat, starts_inside: bool) -> None:
        self._style = style
        self._ending = Markers(style.end, *style.also_end)
        self._text = MarkedText()
        self._space: list[str] = []
        self._inside = starts_inside
        self._state = self._at_start

    def push(self, text: str) -> tuple[str, str]:
        """Takes more text; gives the reasoning and the rest that are certain now."""
        return self._state(text)

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        held = "".join(self._space) + self._text.rest()
        self._space.clear()
        return (held, "") if self._inside else ("", held)

    def _at_start(self, text: str) -> tuple[str, str]:
        """Only white space so far; drops it before `begin`, which may also repeat the prompt's."""
        if text.isspace() or not text:
            self._space.append(text)
            return "", ""
        text = "".join(self._space) + text
        self._space.clear()
        start = len(text) - len(text.lstrip())
        begin = self._style.begin
        if begin.startswith(text[start:]) and text[start:] != begin:
            self._space.append(text)
            return "", ""
        if text.startswith(begin, start):
            self._inside = True
            text = text[start + len(begin) :]
        self._state = self._thinking if self._inside else self._after
        return self._state(text)

    def _thinking(self, text: str) -> tuple[str, str]:
        self._text.push(text)
        reasoning, marker = self._text.read(self._ending)
        if not marker:
            return reasoning, ""
        self._inside = False
        self._state = self._after
        rest = self._text.rest()
        return reasoning, rest if marker == self._style.end else marker + rest

    def _after(self, text: str) -> tuple[str, str]:
        return "", text
