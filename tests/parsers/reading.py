"""Reads answers with a parser, in pieces of every kind, and tells whether its work grows with the answer alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator

from hookline.parsers.contract import ReasoningParser, ToolCallDelta, ToolParser

Call = tuple[str, str]


def read_calls(parser: ToolParser, pieces: Iterable[str]) -> tuple[str, list[Call]]:
    """The content, and name and arguments of each call; checks what every piece of a call must be."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []

    def take(text: str, deltas: Iterable[ToolCallDelta]) -> None:
        content.append(text)
        for delta in deltas:
            if delta.index == len(names):
                assert delta.name
                names.append(delta.name)
                arguments.append([])
            assert delta.index == len(names) - 1
            assert delta.name is None or not arguments[-1]
            arguments[-1].append(delta.arguments)

    for piece in pieces:
        take(*parser.push(piece))
    take(*parser.flush())
    return "".join(content), [(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]


def read_reasoning(parser: ReasoningParser, pieces: Iterable[str]) -> tuple[str, str]:
    """The reasoning, and what follows it; nothing of the one comes behind the other."""
    reasoning: list[str] = []
    rest: list[str] = []
    ended = False
    for thought, text in [*map(parser.push, pieces), parser.flush()]:
        assert not (thought and ended)
        ended |= text != ""
        reasoning.append(thought)
        rest.append(text)
    return "".join(reasoning), "".join(rest)


def random_cuts(text: str, seed: int, count: int = 30) -> Iterator[list[str]]:
    """`text` in pieces: whole, character by character, and at random places."""
    yield [text]
    yield list(text)
    drawn = random.Random(seed)
    for _ in range(count):
        places = sorted(drawn.choices(range(len(text) + 1), k=drawn.randint(1, 12)))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def grows_evenly(read: Callable[[str], object], text: str) -> bool:
    """Whether a 16 times longer text, made of `text`, takes about 16 times as long, and not 256 times.

    A busy machine may spoil a try, so there are three.
    """
    short = (text * (2**13 // len(text) + 1))[: 2**13]
    return any(_seconds(read, short * 16) < 32 * _seconds(read, short) for _ in range(3))


def _seconds(read: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start
