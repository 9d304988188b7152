"""What suites that need no server do beside that: cases on a real one, whose invariants are looked at after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tests.suites.report import Tally
from tests.suites.served import serving
from tests.suites.watch import Watch

T = TypeVar("T")


@asynccontextmanager
async def watched(tally: Tally, model: Path, *options: str, grammars: bool = True) -> AsyncIterator[Watch]:
    """A server, by its watch, which looks at all invariants when the cases are done; `grammars` as of `Watch.begin`."""
    async with serving(model, *options) as served:
        watch = Watch(tally, served)
        await watch.begin(grammars=grammars)
        yield watch
        await watch.check("after the cases over HTTP")


async def several(count: int, ask: Callable[[T], Awaitable[None]], things: Iterable[T]) -> None:
    """Asks for each of `things`, `count` at a time."""
    rest = iter(things)

    async def client() -> None:
        for thing in rest:
            await ask(thing)

    await asyncio.gather(*(client() for _ in range(count)))
