"""Parsers of a plugin, whose faults are to end the request that they belong to and no other.

They run on the event loop, for they are fed with each piece of a stream. So one that raises ends its own request; one
that is slow is found out when it has come back, and ends it too; and one that never comes back stops the server, which
only a process of its own would prevent: see docs/serving.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hookline.errors import PluginError
from hookline.grammar import GrammarSpec
from hookline.parsers.contract import ReasoningFormat, ReasoningParser, ToolFormat, ToolParser

# What one call of a parser may take: of the processor's time, so that a busy machine ends nobody's request, and of the
# clock's, for a parser that waits. A whole answer is one piece: its length counts, since parsers take linear time.
MOST_PROCESSOR_SECONDS = 0.5
MOST_SECONDS = 5.0
SECONDS_A_CHAR = 1e-5

Result = TypeVar("Result")
Second = TypeVar("Second")


class WatchedTools:
    """A format of tool calls whose parsers are watched.

    Args:
        plugin: that serves the model, such as `hookline-llama 0.1`, for the log.
    """

    def __init__(self, inner: ToolFormat, plugin: str) -> None:
        self.markers = inner.markers
        self._inner = inner
        self._name = _name_of(inner, plugin)

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        """See `ToolFormat`."""

        def make() -> ToolParser:
            inner = self._inner.parser(tools)
            return _WatchedParser(inner.push, inner.flush, self._name)

        return _watch(self._name, make)

    def constraint(self, tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool) -> GrammarSpec | None:
        """See `ToolFormat`."""
        return _watch(self._name, self._inner.constraint, tools, name, parallel)


class WatchedReasoning:
    """A format of reasoning whose parsers are watched; as `WatchedTools`."""

    def __init__(self, inner: ReasoningFormat, plugin: str) -> None:
        self.markers = inner.markers
        self.end = inner.end
        self._inner = inner
        self._name = _name_of(inner, plugin)

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: Callable[[str], int | None]) -> bool:
        """See `ReasoningFormat`."""
        return _watch(self._name, self._inner.starts_inside, prompt_token_ids, find_token)

    def parser(self, starts_inside: bool) -> ReasoningParser:
        """See `ReasoningFormat`."""

        def make() -> ReasoningParser:
            inner = self._inner.parser(starts_inside)
            return _WatchedParser(inner.push, inner.flush, self._name)

        return _watch(self._name, make)


class _WatchedParser(Generic[Second]):
    """A parser of either kind."""

    __slots__ = ("_flush", "_name", "_push")

    def __init__(
        self, push: Callable[[str], tuple[str, Second]], flush: Callable[[], tuple[str, Second]], name: str
    ) -> None:
        self._push = push
        self._flush = flush
        self._name = name

    def push(self, text: str) -> tuple[str, Second]:
        return _watch(self._name, _pair, self._push, text, chars=len(text))

    def flush(self) -> tuple[str, Second]:
        return _watch(self._name, _pair, self._flush)


def _watch(name: str, call: Callable[..., Result], *arguments: object, chars: int = 0) -> Result:
    """What `call` gives.

    Args:
        chars: of the text that it is given.

    Raises:
        PluginError: if it raises or takes too long. Clients are told an id of it, the log has the rest.
    """
    begun, used = time.monotonic(), time.thread_time()
    try:
        result = call(*arguments)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name} failed: {type(error).__name__}") from error
    used, taken = time.thread_time() - used, time.monotonic() - begun
    more = SECONDS_A_CHAR * chars
    if used > MOST_PROCESSOR_SECONDS + more or taken > MOST_SECONDS + more:
        raise PluginError(
            f"{name} took {taken:.2f} s ({used:.2f} s of them the processor's) for one piece of an answer, and nothing "
            f"else was served meanwhile; it may take {MOST_PROCESSOR_SECONDS + more:g} s of the processor's time, "
            f"{MOST_SECONDS + more:g} s in all"
        )
    return result


def _pair(call: Callable[..., tuple[str, Second]], *arguments: object) -> tuple[str, Second]:
    first, second = call(*arguments)
    if not isinstance(first, str):
        raise TypeError(f"it gave a {type(first).__name__} for a text")
    return first, second


def _name_of(parsers: object, plugin: str) -> str:
    kind = type(parsers)
    return f"a parser of {kind.__module__}.{kind.__qualname__} (model served by {plugin})"
